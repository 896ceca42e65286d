"""The domain's failures: what went wrong, as facts and in words that a client may read.

What each of them is over HTTP is said in `gateway.api.failures` alone. Texts of the engine are in
none of them: they hold backtraces, paths and addresses.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple


class GatewayError(Exception):
    """Base of all failures that are told to the client. `message` is a sentence for people."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class InvalidRequest(GatewayError):
    """The request is malformed or a value is out of range; `param` is the path of the field."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class UnsupportedParameter(InvalidRequest):
    """A known parameter that changes meaning and is not served; never silently dropped."""


class ContextLengthExceeded(InvalidRequest):
    """Prompt leaves no room for one generated token."""


_MODELS_ARE_LISTED = "GET /v1/models lists the models that your key may use."


class ModelNotFound(InvalidRequest):
    """In the same words whether `model` does not exist or must not be known of."""

    def __init__(self, model: str) -> None:
        super().__init__(f"The model `{model}` does not exist. {_MODELS_ARE_LISTED}", param="model")
        self.model = model


class NotFound(InvalidRequest):
    """In the same words whether there is no such thing or it is another tenant's."""


class PreviousResponseNotFound(NotFound):
    """The response to go on from, or one before it, is not kept: deleted, expired or unknown."""

    def __init__(self, response_id: str) -> None:
        super().__init__(
            f"Previous response with id '{response_id}' not found.", param="previous_response_id"
        )


class ModelNotAllowed(InvalidRequest):
    """A model that everybody may know of, but that is not for this tenant."""

    def __init__(self, model: str) -> None:
        super().__init__(
            f"This key may not use the model `{model}`. {_MODELS_ARE_LISTED}", param="model"
        )
        self.model = model


class InvalidKey(GatewayError):
    """No key, or a wrong one."""


class TooManyWrongKeys(GatewayError):
    """One more wrong admin key from an address that has sent many. A right one is still taken."""


class KeyNotFound(GatewayError):
    """No key that was made over the API has this id."""

    def __init__(self, key_id: str) -> None:
        super().__init__(f"The key `{key_id}` does not exist.")
        self.key_id = key_id


class KeysUnavailable(GatewayError):
    """Keys made over the API cannot be looked at, or changed, now."""


class OverridesUnavailable(GatewayError):
    """What admins say of replicas cannot be changed now."""


class ConversationsUnavailable(GatewayError):
    """What is kept of conversations cannot be read or written now."""


class ConversationTooLarge(InvalidRequest):
    """More than can be kept of one conversation, or read at once."""


class ConversationsOff(UnsupportedParameter):
    """This gateway keeps no conversations."""

    def __init__(self) -> None:
        super().__init__(
            "This gateway keeps no responses and conversations (GATEWAY_CONVERSATIONS_TTL is 0): "
            "send `store: false` and the whole input.",
            param="store",
        )


class SwitchedOff(GatewayError):
    """Nobody may do this here until the operator sets `setting`."""

    def __init__(self, message: str, *, setting: str) -> None:
        super().__init__(message)
        self.setting = setting


NoTurn = Literal["queue_full", "queue_timeout", "expected_wait", "too_late", "core_busy"]
"""Too many waited, or it waited for as long as any may; its turn could not have come in time for
its first token, or did not; the gateway's own core had too much to do."""


class Quota(NamedTuple):
    """What a limit allows, what is used of it, and when it is whole again.

    `held` is what running requests have reserved of a budget besides.
    """

    limit: int
    used: int
    reset_ms: int
    held: int = 0

    @property
    def remaining(self) -> int:
        return max(0, self.limit - self.used - self.held)


class RateLimited(GatewayError):
    """A limit of the tenant is reached.

    Attributes:
        limit: which one, by its name in the configuration.
        wait_ms: when the same request could pass; None says never.
        quotas: the state of the tenant's limits, by name.
    """

    def __init__(
        self, message: str, *, limit: str, wait_ms: int | None, quotas: Mapping[str, Quota]
    ) -> None:
        super().__init__(message)
        self.limit = limit
        self.wait_ms = wait_ms
        self.quotas = quotas


class InsufficientQuota(RateLimited):
    """A budget is used up until its day or month ends."""


class LimitsUnavailable(GatewayError):
    """`limit` cannot be counted now, and the configuration wants it counted."""

    def __init__(self, message: str, *, limit: str) -> None:
        super().__init__(message)
        self.limit = limit


class EngineError(GatewayError):
    """The engine failed on this request for a reason that a retry does not mend."""


class BadModelOutput(EngineError):
    """A model that answers once gave what is no answer: its shape is wrong, or its numbers."""


class AdapterDoesNotFit(EngineError):
    """The adapter is larger than the whole adapter cache of this replica. Another's may be larger.

    `name` is the client's, `nbytes` those of its weights, `most` those of the cache.
    """

    def __init__(self, name: str, nbytes: int, most: int) -> None:
        super().__init__(
            f"The adapter `{name}` has {nbytes} bytes and the inference server's adapter cache "
            f"{most}. The cache must be larger (lora_cache_host_memory_bytes of its model), or the "
            "adapter smaller, such as of a lower rank."
        )


class EngineBroken(EngineError):
    """Not this request failed but what it was given to: the next ones will fail there too."""


class EngineStepFailed(GatewayError):
    """The engine ended all requests that it had, most likely for one of them; it works on.

    Which one it was is not said, so the same request may be what ended the others.
    """


class EngineUnavailable(GatewayError):
    """Triton cannot be reached or is not ready."""


class EngineUnreachable(EngineUnavailable):
    """There is no connection to Triton. `why` is for operators: it may hold addresses."""

    def __init__(self, message: str, *, why: str) -> None:
        super().__init__(message)
        self.why = why


class EngineSilent(TimeoutError):
    """A deadline came while the engine had the request, and had told nobody anything for long."""


class NotTakenInTime(TimeoutError):
    """A deadline came while the answer waited for its client, who pays for what waited."""


class AnswerLost(GatewayError):
    """The replica of an answer that had begun is gone, and another one could not go on with it."""


class Overloaded(GatewayError):
    """There is no place for the request, here or in the engine.

    `wait_s` is how long it would have to wait for one, or how long others who wanted one have
    waited by now, as far as is known. `cause` says why a request did not get its turn.
    """

    def __init__(self, message: str, wait_s: float = 0.0, cause: NoTurn | None = None) -> None:
        super().__init__(message)
        self.wait_s = wait_s
        self.cause = cause


class ClientDeadlineTooNear(Overloaded):
    """It is known by now that there is no place for it before the deadline that its client chose,
    though there would be one for a request without."""


class AdapterNotReady(Overloaded):
    """No replica has the adapter on its disk yet. Another one may, or this one in a moment."""


class ShuttingDown(GatewayError):
    """This gateway is ending and the request outlived the grace; another one may serve it."""


class RequestTimeout(GatewayError):
    """The request outlived its deadline, `limit_s` seconds; generation was stopped."""

    def __init__(self, limit_s: float) -> None:
        super().__init__(f"The request took longer than {limit_s:g} seconds.")
        self.limit_s = limit_s


class ClientDeadline(RequestTimeout):
    """The client had asked for an end before the gateway's own, or did not read what there was by
    then; no failure of ours."""


class EndedByAdmin(GatewayError):
    """An admin ended this request while it ran."""

    def __init__(self) -> None:
        super().__init__("This request was ended by an operator of the server.")


class InternalError(GatewayError):
    """A mistake of ours. What it was is in the log alone."""


class ReplicaLeft(Exception):
    """A stream leaves a replica that is to have none, and goes on at another one."""


class ClientDisconnected(Exception):
    """The client left. Nobody is there to be told."""

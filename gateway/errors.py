"""The domain's errors, with messages that clients may read.

`gateway.api.failures` maps each class to an HTTP status. Messages never contain the engine's error
texts, which hold backtraces, paths and addresses.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple


class GatewayError(Exception):
    """Base of all errors that are reported to clients. `message` is a sentence for people."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class InvalidRequest(GatewayError):
    """The request is malformed or a value is out of range; `param` is the path of the field."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class UnsupportedParameter(InvalidRequest):
    """The request has a parameter that would change the answer but is not supported."""


class ContextLengthExceeded(InvalidRequest):
    """The prompt is so long that no token can be generated."""


_MODELS_ARE_LISTED = "GET /v1/models lists the models that your key may use."


class ModelNotFound(InvalidRequest):
    """The model does not exist, or is hidden from this tenant; the message is the same for both."""

    def __init__(self, model: str) -> None:
        super().__init__(f"The model `{model}` does not exist. {_MODELS_ARE_LISTED}", param="model")
        self.model = model


class NotFound(InvalidRequest):
    """The object does not exist, or is another tenant's; the message is the same for both."""


class PreviousResponseNotFound(NotFound):
    """The response to continue, or one before it, was deleted, has expired or is unknown."""

    def __init__(self, response_id: str) -> None:
        super().__init__(
            f"Previous response with id '{response_id}' not found.", param="previous_response_id"
        )


class ModelNotAllowed(InvalidRequest):
    """The model is public, but this tenant may not use it."""

    def __init__(self, model: str) -> None:
        super().__init__(
            f"This key may not use the model `{model}`. {_MODELS_ARE_LISTED}", param="model"
        )
        self.model = model


class InvalidKey(GatewayError):
    """The key is missing or wrong."""


class TooManyWrongKeys(GatewayError):
    """The client's address has sent many wrong admin keys. A valid key is still accepted."""


class KeyNotFound(GatewayError):
    """No key created over the API has this id."""

    def __init__(self, key_id: str) -> None:
        super().__init__(f"The key `{key_id}` does not exist.")
        self.key_id = key_id


class KeysUnavailable(GatewayError):
    """Keys created over the API cannot be read or changed now."""


class OverridesUnavailable(GatewayError):
    """Weights and drains that admins set for replicas cannot be changed now."""


class ConversationsUnavailable(GatewayError):
    """Stored conversations cannot be read or written now."""


class ConversationTooLarge(InvalidRequest):
    """The conversation is too large to be stored, or to be read at once."""


class ConversationsOff(UnsupportedParameter):
    """Storing conversations is disabled on this gateway."""

    def __init__(self) -> None:
        super().__init__(
            "This gateway stores no responses and conversations (GATEWAY_CONVERSATIONS_TTL is 0): "
            "send `store: false` and the whole input.",
            param="store",
        )


class SwitchedOff(GatewayError):
    """The feature is disabled; the operator enables it by a setting."""

    def __init__(self, message: str, *, setting: str) -> None:
        super().__init__(message)
        self.setting = setting


OverloadCause = Literal["queue_full", "queue_timeout", "expected_wait", "too_late", "core_busy"]
"""Reason why a request got no slot.

The queue was full; the maximum time in the queue passed; the predicted wait for the first token was
too long, or the first token became late while waiting; or the gateway's own core was busy.
"""


class Quota(NamedTuple):
    """The state of a limit.

    Attributes:
        limit: the size of the limit.
        used: the part of the limit that is used.
        reset_ms: milliseconds until the limit is unused again.
        held: the part of a budget that running requests have reserved, in addition to `used`.
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
        limit: the limit's name in the configuration.
        wait_ms: milliseconds until the same request could pass; None for never.
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
    """A budget is used up until the end of its day or month."""


class LimitsUnavailable(GatewayError):
    """A limit cannot be counted now, and the configuration refuses requests in that case."""

    def __init__(self, message: str, *, limit: str) -> None:
        super().__init__(message)
        self.limit = limit


class EngineError(GatewayError):
    """The engine failed on this request, and a retry would not help."""


class BadModelOutput(EngineError):
    """An embedding or rerank model returned a wrong shape, or numbers that are not finite."""


class AdapterDoesNotFit(EngineError):
    """The adapter exceeds the adapter cache of this replica; another replica's may be larger.

    `name` is the model name from the request. `nbytes` is the size of the weights and `most` that
    of the cache, both in bytes.
    """

    def __init__(self, name: str, nbytes: int, most: int) -> None:
        super().__init__(
            f"The adapter `{name}` has {nbytes} bytes and the inference server's adapter cache "
            f"{most}. The cache must be larger (lora_cache_host_memory_bytes of its model), or the "
            "adapter smaller, such as of a lower rank."
        )


class EngineBroken(EngineError):
    """The engine itself is broken, so further requests to it will fail, too."""


class EngineStepFailed(GatewayError):
    """The engine aborted all its requests, most likely because of one of them, but still runs.

    The engine does not report which request caused the failure; it may have been this one.
    """


class EngineUnavailable(GatewayError):
    """Triton cannot be reached or is not ready."""


class EngineUnreachable(EngineUnavailable):
    """No connection to Triton can be made.

    `why` is for operators only, as it may hold addresses.
    """

    def __init__(self, message: str, *, why: str) -> None:
        super().__init__(message)
        self.why = why


class EngineSilent(TimeoutError):
    """A deadline passed, and the engine had sent nothing to any request for a long time."""


class NotTakenInTime(TimeoutError):
    """A deadline passed while the client did not read the answer; unread tokens are billed."""


class AnswerLost(GatewayError):
    """The replica failed during an answer, and no other replica could resume it."""


class Overloaded(GatewayError):
    """No slot is free for the request, in the gateway or in the engine.

    `wait_s` is the estimated wait in seconds, or the time that queued requests have waited so far;
    0 if unknown. `cause` is set if the request got no slot.
    """

    def __init__(
        self, message: str, wait_s: float = 0.0, cause: OverloadCause | None = None
    ) -> None:
        super().__init__(message)
        self.wait_s = wait_s
        self.cause = cause


class ClientDeadlineTooNear(Overloaded):
    """No slot is free before the client's own deadline; a later deadline might be met."""


class AdapterNotReady(Overloaded):
    """No usable replica has the adapter on its disk yet; a retry may succeed."""


class ShuttingDown(GatewayError):
    """The gateway shuts down, and the request outlasted the time that running requests get.

    Another gateway may serve the request.
    """


class RequestTimeout(GatewayError):
    """The request exceeded its deadline and was aborted."""

    def __init__(self, limit_s: float) -> None:
        super().__init__(f"The request took longer than {limit_s:g} seconds.")
        self.limit_s = limit_s


class ClientDeadline(RequestTimeout):
    """The client's own deadline passed, or the client did not read the answer in time.

    This error does not count as a failure of the gateway.
    """


class EndedByAdmin(GatewayError):
    """An admin ended this request while it ran."""

    def __init__(self) -> None:
        super().__init__("This request was ended by an operator of the server.")


class InternalError(GatewayError):
    """A bug in the gateway. Details are only logged."""


class ReplicaLeft(Exception):
    """A stream leaves a drained replica and resumes on another one."""


class ClientDisconnected(Exception):
    """The client left, so no answer can be sent."""

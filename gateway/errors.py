"""Errors of the gateway, with messages that clients may read.

`gateway.api.failures` maps each class to an HTTP status. Messages never contain the engine's error
texts, because these contain backtraces, paths and addresses.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple


class GatewayError(Exception):
    """Base class of errors that are reported to clients. `message` is the text of the report."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class InvalidRequest(GatewayError):
    """The request is malformed, or a value is invalid. `param` is the path of the field."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class UnsupportedParameter(InvalidRequest):
    """The request has a parameter that would change the response but is not supported."""


class ContextLengthExceeded(InvalidRequest):
    """The prompt is so long that the context has no space for a generated token."""


_MODELS_ARE_LISTED = "GET /v1/models lists the models that your key may use."


class ModelNotFound(InvalidRequest):
    """The model does not exist, or belongs to another tenant. The message is the same for both."""

    def __init__(self, model: str) -> None:
        super().__init__(f"The model `{model}` does not exist. {_MODELS_ARE_LISTED}", param="model")
        self.model = model


class NotFound(InvalidRequest):
    """The object does not exist, or belongs to another tenant. The message is the same for both."""


class PreviousResponseNotFound(NotFound):
    """The previous response, or a response before it, is unknown, expired or deleted."""

    def __init__(self, response_id: str) -> None:
        super().__init__(
            f"Previous response with id '{response_id}' not found.", param="previous_response_id"
        )


class ModelNotAllowed(InvalidRequest):
    """The model is for all tenants, but this tenant's configuration does not allow it."""

    def __init__(self, model: str) -> None:
        super().__init__(
            f"This key may not use the model `{model}`. {_MODELS_ARE_LISTED}", param="model"
        )
        self.model = model


class InvalidKey(GatewayError):
    """The API key of the request is missing or wrong."""


class TooManyWrongKeys(GatewayError):
    """The client's address has sent many wrong admin keys. A valid key is still accepted."""


class KeyNotFound(GatewayError):
    """No key created over the API has this id."""

    def __init__(self, key_id: str) -> None:
        super().__init__(f"The key `{key_id}` does not exist.")
        self.key_id = key_id


class DatabaseUnavailable(GatewayError):
    """The gateway's database cannot be used now.

    `why` is the reason. Only operators may read it.
    """

    def __init__(
        self, why: str, message: str = "The gateway's database cannot be used now; try again."
    ) -> None:
        super().__init__(message)
        self.why = why


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
    """The feature is disabled. The message names the setting that enables it."""

    def __init__(self, message: str, *, setting: str) -> None:
        super().__init__(message)
        self.setting = setting


OverloadCause = Literal["queue_full", "queue_timeout", "expected_wait", "too_late", "core_busy"]
"""Reason why a request was not started.

- queue_full: the queue had its maximum length.
- queue_timeout: the request was queued for the maximum time.
- expected_wait: the predicted wait for the first token was too long.
- too_late: the request was queued for so long that its first token would have come too late.
- core_busy: the gateway's own CPU core was busy.
"""


class Quota(NamedTuple):
    """Usage of a limit, in the limit's unit (requests, tokens or concurrent requests).

    Attributes:
        limit: the maximum amount.
        used: the amount that the tenant has used.
        reset_ms: milliseconds until `used` is 0 again, if the tenant sends no further requests.
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
        wait_ms: milliseconds until the same request could be admitted; None if never.
        quotas: the usage of the tenant's limits, by name.
    """

    def __init__(
        self, message: str, *, limit: str, wait_ms: int | None, quotas: Mapping[str, Quota]
    ) -> None:
        super().__init__(message)
        self.limit = limit
        self.wait_ms = wait_ms
        self.quotas = quotas


class InsufficientQuota(RateLimited):
    """The tenant has used all tokens of its budget for the current day or month."""


class LimitsUnavailable(GatewayError):
    """Redis is unavailable, so a limit of the tenant cannot be counted.

    Raised only if the configuration says that requests are refused in this case.
    """

    def __init__(self, message: str, *, limit: str) -> None:
        super().__init__(message)
        self.limit = limit


class EngineError(GatewayError):
    """The engine failed to process this request. A retry would fail again."""


class BadModelOutput(EngineError):
    """An embedding or ranking model returned a wrong tensor shape, or NaN or infinite numbers."""


class AdapterDoesNotFit(EngineError):
    """The adapter is larger than this replica's adapter cache, but may fit on another replica.

    `name` is the model name from the request. `nbytes` is the size of the weights, and `most` the
    size of the cache, both in bytes.
    """

    def __init__(self, name: str, nbytes: int, most: int) -> None:
        super().__init__(
            f"The adapter `{name}` has {nbytes} bytes and the inference server's adapter cache "
            f"{most}. The cache must be larger (lora_cache_host_memory_bytes of its model), or the "
            "adapter smaller, such as of a lower rank."
        )


class EngineBroken(EngineError):
    """The engine is broken: all further requests to it will fail, too."""


class EngineStepFailed(GatewayError):
    """The engine aborted all its running requests, but it accepts new requests.

    One of the aborted requests has probably caused the failure. The engine does not report which
    one, so it may be this request.
    """


class EngineUnavailable(GatewayError):
    """Triton cannot be reached or is not ready."""


class EngineUnreachable(EngineUnavailable):
    """No connection to Triton can be made.

    `why` is the reason. Only operators may read it, because it may contain addresses.
    """

    def __init__(self, message: str, *, why: str) -> None:
        super().__init__(message)
        self.why = why


class EngineSilent(TimeoutError):
    """A request's deadline passed, and the engine had sent no data at all for a long time."""


class NotTakenInTime(TimeoutError):
    """A request's deadline passed while the client did not read the response.

    The tenant is also charged for generated tokens that the client has not read.
    """


class AnswerLost(GatewayError):
    """The replica failed during a response, and no other replica could resume the response."""


class Overloaded(GatewayError):
    """No slot is free for the request, in the gateway or in the engine.

    `wait_s` is the expected wait for a slot in seconds; 0 if unknown. If the wait cannot be
    predicted, `wait_s` is the time that other requests have already waited. `cause` is the reason
    if a queue of the gateway refused the request; None for other refusals.
    """

    def __init__(
        self, message: str, wait_s: float = 0.0, cause: OverloadCause | None = None
    ) -> None:
        super().__init__(message)
        self.wait_s = wait_s
        self.cause = cause


class ClientDeadlineTooNear(Overloaded):
    """No slot will be free before the client's own deadline. A later deadline might be met."""


class AdapterNotReady(Overloaded):
    """No usable replica has the adapter on its disk yet. A retry may succeed."""


class ShuttingDown(GatewayError):
    """The gateway shuts down, and the request did not end within the shutdown grace period.

    Another gateway may serve the request.
    """


class RequestTimeout(GatewayError):
    """The request exceeded its deadline and was aborted."""

    def __init__(self, limit_s: float) -> None:
        super().__init__(f"The request took longer than {limit_s:g} seconds.")
        self.limit_s = limit_s


class ClientDeadline(RequestTimeout):
    """The client's own deadline passed, or the client did not read the response in time.

    The gateway is not at fault, so this error is not counted as a failure.
    """


class EndedByAdmin(GatewayError):
    """An admin ended this request while it ran."""

    def __init__(self) -> None:
        super().__init__("This request was ended by an operator of the server.")


class InternalError(GatewayError):
    """A bug in the gateway. Details are logged, but not sent to the client."""


class ReplicaLeft(Exception):
    """A stream must end on a drained replica, and resume on another replica."""


class ClientDisconnected(Exception):
    """The client has disconnected, so no response can be sent."""

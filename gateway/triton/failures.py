"""The table from the errors of Triton and TensorRT-LLM to the gateway's errors.

Engine texts contain backtraces, file names and addresses. So they are matched by substring, logged,
and never passed on. (Texts: tensorrtllm_backend v0.5 to v0.19 and Triton 2.51.)

See decision 080 in docs/decisions.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from enum import IntEnum
from functools import partial

from gateway.errors import (
    AdapterNotReady,
    ContextLengthExceeded,
    EngineBroken,
    EngineError,
    EngineStepFailed,
    EngineUnavailable,
    EngineUnreachable,
    GatewayError,
    InvalidRequest,
    Overloaded,
    UnsupportedParameter,
)

log = logging.getLogger(__name__)

_Failure = Callable[[], GatewayError]


class Status(IntEnum):
    """gRPC status codes that are handled separately; a server may send others."""

    OK = 0
    CANCELLED = 1
    UNKNOWN = 2
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    UNAUTHENTICATED = 16


# With grpcio a connection that is reset in the middle of a stream ends in UNKNOWN.
_UNAVAILABLE_STATUSES = (Status.UNAVAILABLE, Status.CANCELLED, Status.UNKNOWN, Status.NOT_FOUND)
# The process of a Python model has died.
_DEAD = re.compile(r"(Failed to process [^,]*, message: )?Stub process '[^']*' is not healthy")

_BUSY = "The engine's queue is full; try again shortly."
_UNAVAILABLE = "The inference server is not available; try again shortly."
_RETRY_AFTER_S = 2.0
_PATH_IS_WRONG = "lora_path does not exist"
_ADAPTER_MISSING = "The adapter is not on the inference server's disk; try again shortly."
_TOO_LONG = "The prompt is longer than this model's maximum input length."
_BAD_GUIDE = (
    "The engine cannot enforce this response_format, structured_outputs or tool schema: it is "
    "invalid or uses what the engine's grammar compiler does not know."
)
_NO_GUIDES = "Guided decoding is not set up in this engine."
_FAILED = "The engine failed to process the request."
_STEP_FAILED = "A step of the engine failed, with all requests that were in it; try again."

_TEXTS: tuple[tuple[str, type[GatewayError], str], ...] = (
    ("Maximum queue size of", Overloaded, _BUSY),
    ("Exceeds maximum queue size", Overloaded, _BUSY),
    ("Request timeout expired", Overloaded, _BUSY),
    ("exceeds maximum input length", ContextLengthExceeded, _TOO_LONG),
    ("greater than max input length", ContextLengthExceeded, _TOO_LONG),
    ("Incorrect sampling config", InvalidRequest, "The engine refused the sampling parameters."),
    ("Guided decoding failed", InvalidRequest, _BAD_GUIDE),
    ("Guided decoding error", InvalidRequest, _BAD_GUIDE),  # TensorRT-LLM 1.2
    ("GuidedDecoder is not setup", InvalidRequest, _NO_GUIDES),
    ("is not found", EngineUnavailable, _UNAVAILABLE),
    ("is not at ready state", EngineUnavailable, _UNAVAILABLE),
    ("is not healthy", EngineUnavailable, _UNAVAILABLE),  # the process of a Python model has died
    ("no available versions", EngineUnavailable, _UNAVAILABLE),
    ("is shutting down", EngineUnavailable, _UNAVAILABLE),
    ("Shutdown called", EngineUnavailable, _UNAVAILABLE),
    (
        "Request cancelled by client",
        EngineUnavailable,
        _UNAVAILABLE,
    ),  # llmapi, for a request that was not cancelled here
)

# The llmapi model begins every error so: the client's mistakes and its own failures. Texts that may
# also occur in an engine's own failures are searched only after this beginning.
_LLMAPI = "Error generating request"
_LLMAPI_TEXTS: tuple[tuple[str, _Failure], ...] = (
    ("should not exceed max_num_tokens", partial(ContextLengthExceeded, _TOO_LONG)),
    ("max_seq_len", partial(ContextLengthExceeded, _TOO_LONG)),
    (
        "Streaming is only supported",
        partial(UnsupportedParameter, "stream: the model answers once.", param="stream"),
    ),
    (_PATH_IS_WRONG, partial(AdapterNotReady, _ADAPTER_MISSING, _RETRY_AFTER_S)),
    ("lora_", partial(InvalidRequest, "The engine refused the adapter.", param="model")),
    (
        "Unsupported image_url",
        partial(InvalidRequest, "The engine cannot load the image.", param="messages"),
    ),
)

# After these errors an engine fails every request, while Triton still reports it as ready.
_BROKEN = ("CUDA runtime error", "CUDA driver error", "CUDA error", "NCCL error")
_OUT_OF_MEMORY = "out of memory"  # of the device, for one request
# One request that the engine cannot run ends all active ones; the engine continues with the next.
_STEP = ("error in forwardAsync function", "error in forwardSync function")


_MAX_LOGGED_CHARS = 500


def _to_log_line(text: str) -> str:
    """Return the part of a text that is logged.

    Some of it may be the client's. So it must not look like other log lines or control a terminal,
    and prompts must not be logged.
    """
    first_line = text.lstrip()[:_MAX_LOGGED_CHARS].splitlines()[0] if text.strip() else "(empty)"
    return first_line if first_line.isprintable() else ascii(first_line)[1:-1]


def is_lora_missing(text: str) -> bool:
    """Return True if the engine does not hold the adapter (any more), so the weights must be
    sent."""
    return "not found in cache" in text


def is_lora_cache_full(text: str) -> bool:
    """Return True if every adapter that the engine holds is in use, so one must become idle
    first."""
    return "PEFT Cache is full" in text or "no done tasks to evict" in text


def from_text(text: str) -> GatewayError:
    """Return the error for the `error_message` of a stream response, whose status code is not
    sent."""
    # The rest of the text concerns one request; do not return it to every client of the step.
    step = any(fragment in text for fragment in _STEP)
    for fragment, make in _LLMAPI_TEXTS if _LLMAPI in text else ():
        if fragment in text:
            if fragment == _PATH_IS_WRONG:
                # Replicas may see another folder than configured: GATEWAY_PEFT_DIR, --path.
                log.error("%s", _to_log_line(text))
            return make()
    for fragment, error, message in () if step else _TEXTS:
        if fragment in text:
            return error(message)
    log.error("engine error: %s", _to_log_line(text))
    if any(fragment in text for fragment in _BROKEN) and _OUT_OF_MEMORY not in text:
        return EngineBroken(_FAILED)
    return EngineStepFailed(_STEP_FAILED) if step else EngineError(_FAILED)


def from_status(status: int, text: str) -> GatewayError:
    """Return the error for the status of a failed RPC.

    The text of a model that answers once may contain the request's own words: a client that writes
    "is not found" must not make the model unavailable for others. So the text is only logged, and
    not searched.
    """
    if status in _UNAVAILABLE_STATUSES or _DEAD.match(text):
        return EngineUnavailable(_UNAVAILABLE)
    if status == Status.DEADLINE_EXCEEDED:
        return EngineUnavailable("The inference server did not answer in time.")
    log.error("engine error: %s", _to_log_line(text))
    # An engine reports a request's own failure within a call that succeeds.
    return (EngineError if status == Status.RESOURCE_EXHAUSTED else EngineBroken)(_FAILED)


def no_connection(why: str) -> EngineUnreachable:
    """Return the error of a failed connection. `why` is shown to operators only."""
    return EngineUnreachable(_UNAVAILABLE, why=why)

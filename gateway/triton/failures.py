"""Translation of errors from Triton and TensorRT-LLM to the gateway's errors.

An error is recognised by a substring of its text. The text is logged but never sent to clients,
because it contains backtraces, file names and addresses. (The texts come from tensorrtllm_backend
v0.5 to v0.19 and Triton 2.51.)

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
    """gRPC status codes that the gateway distinguishes. A server may send other codes."""

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


# Status codes that mean that the server is unavailable. UNKNOWN is one of them, because grpcio
# reports it for a connection that was reset in the middle of a stream.
_UNAVAILABLE_STATUSES = (Status.UNAVAILABLE, Status.CANCELLED, Status.UNKNOWN, Status.NOT_FOUND)
# Triton's error text after the process of a Python model has died.
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
    ),  # from the llmapi model, for a request that the gateway did not cancel
)

# Beginning of every error text of the llmapi model, for invalid requests and for the model's own
# failures. `_LLMAPI_TEXTS` are searched only in texts that contain this beginning. Error texts of
# other models may contain one of `_LLMAPI_TEXTS` by chance.
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

# Texts of errors after which the engine fails every request, although Triton reports it as ready.
_BROKEN = ("CUDA runtime error", "CUDA driver error", "CUDA error", "NCCL error")
# Exception to `_BROKEN`: if an error text also contains this text, one request has needed too much
# GPU memory. Only this request fails, and the engine is not broken.
_OUT_OF_MEMORY = "out of memory"
# Error texts of a failed engine step. The engine could not run one request, and has ended all
# active requests with this error. It continues with later requests.
_STEP = ("error in forwardAsync function", "error in forwardSync function")


_MAX_LOGGED_CHARS = 500


def _to_log_line(text: str) -> str:
    """Return the beginning of an error text's first line for the log, escaped if needed.

    An error text may quote a client's request. Only the first line is logged, because later lines
    may contain a prompt. Control characters are escaped, because they could fake other log lines.
    """
    first_line = text.lstrip()[:_MAX_LOGGED_CHARS].splitlines()[0] if text.strip() else "(empty)"
    return first_line if first_line.isprintable() else ascii(first_line)[1:-1]


def is_lora_missing(text: str) -> bool:
    """Return True if an error text says that the adapter is not in the engine's adapter cache.

    The adapter's weights must then be sent.
    """
    return "not found in cache" in text


def is_lora_cache_full(text: str) -> bool:
    """Return True if an error text says that the adapter cache is full of adapters in use.

    The request can run as soon as one of these adapters is idle.
    """
    return "PEFT Cache is full" in text or "no done tasks to evict" in text


def from_text(text: str) -> GatewayError:
    """Return the error for the `error_message` of a stream response, which has no status code."""
    # If an engine step fails because of one request, all requests of the step get the same error
    # text. Do not search this text for invalid parameters. Otherwise, the other clients would get
    # an error about a parameter that they have not sent.
    step = any(fragment in text for fragment in _STEP)
    for fragment, make in _LLMAPI_TEXTS if _LLMAPI in text else ():
        if fragment in text:
            if fragment == _PATH_IS_WRONG:
                # Log the text for the operator: the configured path (GATEWAY_PEFT_DIR, --path) may
                # differ from the path on the replica.
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
    """Return the error for the status code and text of a failed RPC.

    Only the beginning of the text is compared, with `_DEAD` (Triton's text for a dead model
    process). The rest is not searched, because it may quote the client's request. Otherwise, a
    client could write Triton's text into a prompt, and the model would count as unavailable.
    """
    if status in _UNAVAILABLE_STATUSES or _DEAD.match(text):
        return EngineUnavailable(_UNAVAILABLE)
    if status == Status.DEADLINE_EXCEEDED:
        return EngineUnavailable("The inference server did not answer in time.")
    log.error("engine error: %s", _to_log_line(text))
    # An error of a single request is reported in a call with the status OK. Any other status
    # therefore means that the engine is broken.
    return (EngineError if status == Status.RESOURCE_EXHAUSTED else EngineBroken)(_FAILED)


def no_connection(why: str) -> EngineUnreachable:
    """Return the error for a failed connection. Only operators see the text `why`."""
    return EngineUnreachable(_UNAVAILABLE, why=why)

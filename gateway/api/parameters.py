"""What becomes of every parameter: a body of JSON to a request.

A parameter is served, accepted without effect because it has no meaning to lose, or refused by
name; nothing is dropped silently.
"""

from __future__ import annotations

from typing import Any, TypeVar

from pydantic import ValidationError

from gateway.api.schemas import GenerationRequest
from gateway.api.strict_json import load_object
from gateway.api.validation import invalid_request
from gateway.errors import InvalidRequest, UnsupportedParameter

# No effect on the answer's meaning: bookkeeping, routing and caching hints of OpenAI's platform.
HARMLESS = frozenset(
    {
        "metadata",
        "prediction",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    }
)

# Known parameters that change meaning and are not served, with the values that ask for nothing.
NOT_SERVED: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "function_call": (),
    "functions": (),
    "min_p": (0, 0.0),
    "modalities": (["text"],),
    "moderation": (),
    "suffix": ("",),
    "verbosity": ("medium",),
    "web_search_options": (),
}

R = TypeVar("R", bound=GenerationRequest)


def parse(model: type[R], body: bytes) -> R:
    """Validates a JSON body. Raises InvalidRequest or UnsupportedParameter naming the parameter."""
    data = load_object(body)
    fields = model.model_fields
    served = {}
    for name, value in data.items():
        # null means unset: the SDKs send it for parameters that are passed as None.
        if value is None:
            continue
        if name in fields:
            served[name] = value
        else:
            _check_not_served(name, value)
    try:
        request = model.model_validate(served)
    except ValidationError as error:
        raise invalid_request(error) from None
    if request.stream_options is not None and not request.stream:
        raise InvalidRequest(
            "stream_options may only be set together with stream.", param="stream_options"
        )
    return request


def _check_not_served(name: str, value: Any) -> None:
    """Raises UnsupportedParameter and InvalidRequest unless it asks for nothing."""
    if name in HARMLESS:
        return
    neutral = NOT_SERVED.get(name)
    if neutral is None:
        raise InvalidRequest(f"Unrecognized request argument: {name}.", param=name)
    # `in` would take True for 1 and False for 0.
    if not any(value == option and type(value) is type(option) for option in neutral):
        raise UnsupportedParameter(f"{name} is not supported by this server.", param=name)

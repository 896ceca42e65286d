"""Limits of one generation request: number of sequences, output tokens per choice, and timeout.

The limits come from the request's body, the header x-request-timeout and the tenant's
configuration.
"""

from __future__ import annotations

import math
import re

from fastapi import Request

from gateway.api.openai.generation_request import GenerationRequest
from gateway.api.request_log import header_of
from gateway.api.validation import show_value
from gateway.config.tenants import Tenant
from gateway.errors import InvalidRequest

# The pattern is stricter than `float`, which accepts `1_0` and spaces of any alphabet. No digit can
# match two parts of the pattern, so a header of 64 KiB is scanned in linear time.
_NUMBER = re.compile(r"\+?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")


def count_sequences(tenant: Tenant | None, wanted: GenerationRequest) -> int:
    """Return the number of sequences to generate: prompts times sequences per prompt.

    Each sequence counts toward the tenant's limit `concurrent_requests`. Raise InvalidRequest if
    the number exceeds this limit.
    """
    sequences, prompts = wanted.num_sequences, wanted.num_prompts
    total = prompts * sequences
    allowed = tenant.concurrent_requests if tenant else None
    if allowed is not None and total > allowed:
        what = (
            f"{prompts} prompts of {sequences} choices" if prompts > 1 else f"{sequences} choices"
        )
        raise InvalidRequest(
            f"{what} asked for; this key may have {allowed} at once.",
            param="prompt" if prompts > 1 else "n",
        )
    return total


def parse_timeout(request: Request, max_s: float) -> float | None:
    """Return the timeout in seconds from the header x-request-timeout; None if there is none.

    A timeout of `max_s` or more counts as none. Raise InvalidRequest for a malformed header.
    """
    given = header_of(request.scope, b"x-request-timeout")
    if given is None:
        return None
    seconds = float(given) if _NUMBER.fullmatch(given) else 0.0
    if not 0 < seconds < math.inf:
        raise InvalidRequest(
            f"x-request-timeout: found {given[:40]!r}; allowed: a number of seconds above 0.",
            param="x-request-timeout",
        )
    return seconds if seconds < max_s else None


def resolve_output_limit(tenant: Tenant | None, wanted: GenerationRequest) -> int | None:
    """Return the maximum number of output tokens per choice; None for no limit.

    The request's limit takes precedence over the tenant's `max_output_tokens`. Raise InvalidRequest
    if the request's limit exceeds the tenant's.
    """
    asked = wanted.output_limit
    allowed = tenant.max_output_tokens if tenant else None
    if asked is None or allowed is None:
        return allowed if asked is None else asked
    if asked > allowed:
        given = wanted.model_fields_set
        param = "max_completion_tokens" if "max_completion_tokens" in given else "max_tokens"
        raise InvalidRequest(
            f"{param}: found {show_value(asked)}; this key allows {allowed}.", param=param
        )
    return asked

"""Error responses in OpenAI's or Anthropic's protocol, depending on the request."""

from __future__ import annotations

from collections.abc import Mapping

from gateway.api import failures
from gateway.api.anthropic import error_envelope as anthropic
from gateway.api.failures import ErrorResponse, Failure
from gateway.api.meant_paths import find_meant_path

_MESSAGES, _MODELS = "/v1/messages", "/v1/models"
_VERSION = b"anthropic-version"


def build_error_response(path: str, fields: Mapping[bytes, bytes], error: Failure) -> ErrorResponse:
    """Build the error response to a request for `path` with the headers `fields`."""
    meant = find_meant_path(path)
    anthropics = is_anthropic(meant.path if meant else path, fields)
    return failures.build_response(
        error, anthropic.build_envelope if anthropics else failures.build_envelope
    )


def is_anthropic(path: str, fields: Mapping[bytes, bytes]) -> bool:
    """Return True if a request uses Anthropic's protocol instead of OpenAI's.

    The paths of models are the same in both protocols. For these paths, a request with the header
    `anthropic-version` uses Anthropic's.
    """
    return _is_at(path, _MESSAGES) or (_VERSION in fields and _is_at(path, _MODELS))


def _is_at(path: str, root: str) -> bool:
    return path == root or path.startswith(root + "/")

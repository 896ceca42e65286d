"""A failure as the answer that who asked for this path understands."""

from __future__ import annotations

from gateway.api import failures
from gateway.api.anthropic import errors as anthropic
from gateway.api.failures import Answer, Failure

_ANTHROPIC = "/v1/messages"


def answer_at(path: str, error: Failure) -> Answer:
    """The whole answer, for a client that has been told nothing yet."""
    ours = path == _ANTHROPIC or path.startswith(_ANTHROPIC + "/")
    return failures.answer(error, anthropic.envelope if ours else failures.envelope)

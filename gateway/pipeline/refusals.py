"""Errors with which model variants refuse a request; the client gets the first error."""

from __future__ import annotations

from typing import NoReturn

from gateway.errors import InvalidRequest


class VariantRefusals:
    """Store for the first error with which a model variant refuses a request.

    The error is stored without its traceback, to free memory: a traceback refers to stack frames,
    and the frames refer to prompts of megabytes. If a frame also refers to the error, the frame and
    the error are a reference cycle, which only the garbage collector frees.
    """

    def __init__(self) -> None:
        self._first: InvalidRequest | None = None

    def note(self, error: InvalidRequest) -> None:
        self._first = self._first or error.with_traceback(None)

    def raise_first(self) -> NoReturn:
        """Raise the first error. Call this only after at least one call of `note`."""
        first, self._first = self._first, None
        assert first is not None
        try:
            raise first
        finally:
            del first

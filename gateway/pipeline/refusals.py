"""Errors with which model variants refuse a request; the client gets the first error."""

from __future__ import annotations

from typing import NoReturn

from gateway.errors import InvalidRequest


class VariantRefusals:
    """Store for the first error with which a model variant refuses a request.

    The error is stored without its traceback, because the frames of a traceback would keep prompts
    of megabytes in memory. A frame that refers to the error would also form a reference cycle,
    which only the garbage collector frees.
    """

    def __init__(self) -> None:
        self._first: InvalidRequest | None = None

    def note(self, error: InvalidRequest) -> None:
        self._first = self._first or error.with_traceback(None)

    def raise_first(self) -> NoReturn:
        """Raise the first error; there must be one."""
        first, self._first = self._first, None
        assert first is not None
        try:
            raise first
        finally:
            del first

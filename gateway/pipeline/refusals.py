"""Collection of the errors of several model variants; the client gets the first error."""

from __future__ import annotations

from typing import NoReturn

from gateway.errors import InvalidRequest


class VariantRefusals:
    """The first of the errors with which variants refuse a request.

    The error is stored without its traceback, which would hold frames with a prompt of megabytes. A
    frame that holds the error would also form a reference cycle, which lives until the garbage
    collector runs.
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

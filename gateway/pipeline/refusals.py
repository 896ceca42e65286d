"""Of several kinds of replicas each may refuse a request; one refusal is told."""

from __future__ import annotations

from typing import NoReturn

from gateway.errors import InvalidRequest


class VariantRefusals:
    """Keeps the first.

    Without its traceback: that holds frames and what is in them, a prompt of megabytes, and a frame
    that holds the error in turn would keep all until the garbage collector looks.
    """

    def __init__(self) -> None:
        self._first: InvalidRequest | None = None

    def note(self, error: InvalidRequest) -> None:
        self._first = self._first or error.with_traceback(None)

    def raise_first(self) -> NoReturn:
        """Raises the first, of which there is one."""
        first, self._first = self._first, None
        assert first is not None
        try:
            raise first
        finally:
            del first

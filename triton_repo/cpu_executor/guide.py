"""Position of one sequence in the grammar that its output must follow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from guides.reasons import NOTHING_FITS, reason

if TYPE_CHECKING:
    from llguidance import LLMatcher


class GuideError(Exception):
    """The guide is no valid grammar, or the output cannot be continued in it."""


class GuideState:
    """Position in a grammar that masks logits so that the sequence follows it."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    def fork(self) -> GuideState:
        """Return an independent copy at the same position."""
        return GuideState(self._matcher.deep_copy())

    def mask(self, logits: NDArray[np.float32], end_ids: Sequence[int]) -> None:
        """Set to -inf the ids that must not come next, in place on one row ``[vocab]``.

        ``end_ids`` end the sequence: they are allowed exactly when the grammar is complete. Raises
        ``GuideError`` if no id is allowed, or if a limit on the work for one step is exceeded.
        """
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        self._check()
        unpacked = np.unpackbits(bits, count=len(logits), bitorder="little")
        allowed = unpacked.view(np.bool_)
        allowed[end_ids] = self._matcher.is_accepting()
        if not allowed.any():
            raise GuideError(NOTHING_FITS)
        logits[~allowed] = -np.inf

    def accept(self, token: int) -> None:
        """Advance by a chosen id that does not end the sequence."""
        self._matcher.consume_token(token)
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise GuideError(reason(self._matcher.get_error()))

"""Guided decoding of one sequence: its position in the grammar that the output must follow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from guides.reasons import NOTHING_FITS, reason

if TYPE_CHECKING:
    from llguidance import LLMatcher


class GuideError(Exception):
    """The guide is not a valid grammar, or no continuation of the output follows the grammar."""


class GuideState:
    """A sequence's position in a grammar. Masks logits to make the output follow the grammar."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    def fork(self) -> GuideState:
        """Return an independent copy at the same position."""
        return GuideState(self._matcher.deep_copy())

    def mask(self, logits: NDArray[np.float32], end_ids: Sequence[int]) -> None:
        """Set the logits of ids that must not come next to -inf, in place, in one row ``[vocab]``.

        ``end_ids``, which end the sequence, are allowed exactly if the output so far is complete.
        Raises ``GuideError`` if no id is allowed or a step takes more work than llguidance allows.
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
        """Advance the position by a chosen id, which must not be an end id."""
        self._matcher.consume_token(token)
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise GuideError(reason(self._matcher.get_error()))

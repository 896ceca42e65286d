"""Guided decoding of one sequence: the state of the grammar that its output must follow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from guides.reasons import NOTHING_FITS, reason

if TYPE_CHECKING:
    from llguidance import LLMatcher


class GuideError(Exception):
    """A request's guide is not a valid grammar, or its grammar allows no next token."""


class GuideState:
    """The grammar state of one sequence, which masks the logits of ids that the grammar forbids."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    def fork(self) -> GuideState:
        """Return an independent copy of the state."""
        return GuideState(self._matcher.deep_copy())

    def mask(self, logits: NDArray[np.float32], end_ids: Sequence[int]) -> None:
        """Set the logits ``[vocab]`` of all ids that the grammar forbids to -inf, in place.

        ``end_ids`` are the ids that end the sequence. They are allowed if, and only if, the output
        so far is a complete text of the grammar. Raises ``GuideError`` if no id is allowed, or if
        the computation exceeds one of llguidance's limits.
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
        """Advance the state by a chosen id, which must not be an end id."""
        self._matcher.consume_token(token)
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise GuideError(reason(self._matcher.get_error()))

"""Continuation of an answer on another replica after its replica failed or was left.

The other replica gets the prompt and all tokens that the client has received, and generates the
rest. A greedy answer is then the same as without the failure. A sampled answer continues with
another seed, because the random state is lost with the engine. Such an answer is marked as
`continued`.

An engine starts a guide at its beginning. So a guided answer is regenerated from the start, with
the same seed. Once all tokens that the client has are regenerated, the guide is in the same state
as before.

See decision 066 in docs/decisions.
"""

from __future__ import annotations

from array import array
from dataclasses import replace
from hashlib import blake2b

from gateway.deltas import TokenDelta
from gateway.generation.engine_request import Generation
from gateway.generation.options import MAX_SEED
from gateway.pipeline.fit import longest_prompt
from gateway.scheduling.kinds import ModelVariant


class Continuation:
    """The tokens of one generation so far, and the request for the rest of it.

    Only answers that arrive as token ids can be resumed: the ids behind a text are unknown. Beam
    searches cannot be resumed either, since they have no result before their end.
    """

    def __init__(self, generation: Generation, failures: int) -> None:
        """Allow the answer to be resumed after at most `failures` failures of replicas.

        With 0, the answer cannot leave a draining replica either.
        """
        self._original = generation
        self._failures_left = self._failures_allowed = failures
        self._resumptions = 0
        self.regenerates = generation.params.guide is not None
        """True if the answer is regenerated from its beginning on the other replica."""
        self.current: Generation | None = None
        """The generation that another replica executes now; None before the first resumption."""
        self.ids = array("i")
        """Token ids received so far. `Choice` appends the new ones."""
        self._regenerated = 0
        self.has_diverged = False
        """True once the regenerated answer differs from what the client has received."""

    @property
    def is_resampled(self) -> bool:
        """Return True if a part of the answer was sampled with another seed."""
        return bool(self._resumptions) and not self.regenerates and not self._original.params.greedy

    def resume(self, rest: Generation, *, failed: bool) -> int:
        """Record that the answer is resumed as `rest`, the result of `remaining`.

        `failed` is True if the replica failed, and False if it was left. Returns the number of
        tokens that the other replica has to process before the first new token.
        """
        self.current = rest
        self._resumptions += 1
        self._failures_left -= failed
        self._regenerated = 0
        return len(self._original.prompt_ids) + len(self.ids)

    def strip_delivered(self, delta: TokenDelta) -> TokenDelta | None:
        """Return the part of a delta that the client has not received; None if there is none.

        Used for an answer that is regenerated. Sets `has_diverged` if the delta differs from the
        tokens that the client has received.
        """
        known = self.ids[self._regenerated : self._regenerated + len(delta.ids)]
        count = len(known)
        self._regenerated += len(delta.ids)
        missing = delta.final and self._regenerated < len(self.ids)
        self.has_diverged = self.has_diverged or missing or delta.ids[:count] != known.tolist()
        if self.has_diverged or (count == len(delta.ids) and not delta.final):
            return None
        logprobs = None if delta.logprobs is None else delta.logprobs[count:]
        return replace(delta, ids=delta.ids[count:], logprobs=logprobs)

    def tokens_not_delivered(self, tokens: int) -> int:
        """Return the number of the engine's next `tokens` tokens that are new to the client."""
        if self.current is None or not self.regenerates:
            return tokens
        return max(self._regenerated + tokens - len(self.ids), 0)

    def remaining(self, *, failed: bool) -> Generation | None:
        """Return the rest of the answer as a new generation; None if the answer cannot be resumed.

        The new generation has another id, since the old engine may still run the old request. After
        a bounded number of failures, nothing is sent again: the request itself may be what makes
        engines fail.
        """
        whole = self._original
        if self._failures_left < failed or not self._failures_allowed or whole.beams:
            return None
        if self.regenerates and not failed:
            # Stay on the current replica, which still works: a guided answer may diverge on another
            # one.
            return None
        ids = array("i") if self.regenerates else self.ids
        length = len(whole.prompt_ids) + len(ids)
        forms = {kind: None for kind, text in whole.forms.items() if text is None}
        forms = {kind: None for kind in forms if _fits(kind, length)}
        if not forms or len(self.ids) >= whole.max_tokens:
            return None
        times = self._resumptions + 1
        min_tokens = max(whole.params.min_tokens - len(ids), 0)
        # Without `usage`: the new replica's cache hits are not the client's cached_tokens.
        params = replace(whole.params, min_tokens=min_tokens, usage=False)
        return replace(
            whole,
            request_id=f"{whole.request_id}-{times}",
            prompt_ids=whole.prompt_ids + ids,
            max_tokens=whole.max_tokens - len(ids),
            seed=whole.seed if self.regenerates else _derive_seed(whole.seed, times),
            params=params,
            text=None,
            forms=forms,
        )


def _fits(kind: object, length: int) -> bool:
    return isinstance(kind, ModelVariant) and length <= longest_prompt(kind.capabilities)


def _derive_seed(seed: int, times: int) -> int:
    """Return the seed for resumption number `times`: reproducible, and unlikely to be in use."""
    digest = blake2b(b"%d %d" % (seed, times), digest_size=8).digest()
    return int.from_bytes(digest, "big") & MAX_SEED

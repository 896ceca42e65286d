"""Continuation of an answer on another replica, after the first replica failed or was drained.

The other replica gets the prompt and all tokens of the answer so far, and generates the remaining
tokens. A greedy answer is then the same as without the failure. A sampled answer continues with
another seed, because the random state of the first engine is lost. Such an answer is marked as
`continued`.

With guided decoding (a "guide" is a JSON schema, regular expression or grammar), the engine expects
an answer to start at the start of the guide. So a guided answer is regenerated from its first
token, with the same seed. Tokens that the client has received already are not sent again.

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
    """The tokens of one generation so far, and the engine request for its remaining tokens.

    A response can be resumed only if the engine sends token ids, because the resumed request
    contains these ids. Beam searches cannot be resumed, because they have no result before their
    end.
    """

    def __init__(self, generation: Generation, failures: int) -> None:
        """Prepare to resume `generation` on another replica.

        `failures` is the maximum number of failed replicas. After more failures, the response
        cannot be resumed. If `failures` is 0, the response cannot migrate from a draining replica
        either.
        """
        self._original = generation
        self._failures_left = self._failures_allowed = failures
        self._resumptions = 0
        self.regenerates = generation.params.guide is not None
        """True if the other replica must regenerate the response from its beginning."""
        self.current: Generation | None = None
        """The engine request of the last resumption; None before the first resumption."""
        self.ids = array("i")
        """Token ids received so far. `Choice` appends new ids."""
        self._regenerated = 0
        self.has_diverged = False
        """True if the regenerated response differs from the tokens that the client has received."""

    @property
    def is_resampled(self) -> bool:
        """True if the response was resumed, and its later tokens were sampled with another seed."""
        return bool(self._resumptions) and not self.regenerates and not self._original.params.greedy

    def resume(self, rest: Generation, *, failed: bool) -> int:
        """Record that another replica resumes the response with the engine request `rest`.

        `rest` must come from `remaining`. `failed` is True if the old replica failed, and False if
        the response migrates from a draining replica. Return the number of tokens that the new
        replica has to process before the first new token.
        """
        self.current = rest
        self._resumptions += 1
        self._failures_left -= failed
        self._regenerated = 0
        return len(self._original.prompt_ids) + len(self.ids)

    def strip_delivered(self, delta: TokenDelta) -> TokenDelta | None:
        """Return the part of a regenerated delta that the client has not received yet.

        Return None if there is no such part. If the delta differs from the tokens that the client
        has received, set `has_diverged` and return None.
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
        """Return how many of the next `tokens` tokens from the engine are new for the client."""
        if self.current is None or not self.regenerates:
            return tokens
        return max(self._regenerated + tokens - len(self.ids), 0)

    def remaining(self, *, failed: bool) -> Generation | None:
        """Return an engine request for the remaining tokens. Return None if this is not possible.

        `failed` is True if the old replica failed, and False if the response migrates from a
        draining replica. After the maximum number of failures, return None: the request itself may
        have caused the failures. The engine request has a new id, because the old replica may still
        run the request with the old id.
        """
        whole = self._original
        if self._failures_left < failed or not self._failures_allowed or whole.beams:
            return None
        if self.regenerates and not failed:
            # Stay on the draining replica, which still works. Another replica may regenerate the
            # response with other tokens than the client has received.
            return None
        ids = array("i") if self.regenerates else self.ids
        length = len(whole.prompt_ids) + len(ids)
        forms = {kind: None for kind, text in whole.forms.items() if text is None}
        forms = {kind: None for kind in forms if _fits(kind, length)}
        if not forms or len(self.ids) >= whole.max_tokens:
            return None
        times = self._resumptions + 1
        min_tokens = max(whole.params.min_tokens - len(ids), 0)
        # Do not ask for the report of cache hits (`usage`). The client's `cached_tokens` must count
        # only the hits of its original engine request, not the hits on the new replica.
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
    """Return the seed for resumption number `times`. The same arguments give the same seed."""
    digest = blake2b(b"%d %d" % (seed, times), digest_size=8).digest()
    return int.from_bytes(digest, "big") & MAX_SEED

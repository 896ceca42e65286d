"""An answer whose replica fails, or is to be left, goes on at another one.

The other is asked for what is left, behind the prompt and all that the client has. A greedy answer
is then the one that it would have been. A sampled one goes on by another seed, and says so: the
random numbers that it would have had are known to the engine that is gone.

An engine begins with a guide at its beginning. So what is guided is asked for again as a whole, by
the same seed; where the other says what the client has, its guide is where the first one was.
"""

from __future__ import annotations

from array import array
from dataclasses import replace
from hashlib import blake2b

from gateway.deltas import TokenDelta
from gateway.generation import MAX_SEED, Generation
from gateway.pipeline.fit import longest_prompt
from gateway.scheduling.kinds import ModelVariant


class Continuation:
    """What has come of one generation, and what of it is left.

    Only what is made of token ids goes on: of a text nobody knows which ids it was. Nor does a
    search, of which nothing is known before its end.
    """

    def __init__(self, generation: Generation, failures: int) -> None:
        """Goes on after so many `failures`; with 0, after nothing at all."""
        self._whole = generation
        self._failures = self._allowed = failures
        self._times = 0
        self.again = generation.params.guide is not None
        """Whether it is said again from its beginning."""
        self.sent: Generation | None = None
        """What goes on now; None before that."""
        self.ids = array("i")
        """What has come, to be added to by who receives it."""
        self._heard = 0
        self.differs = False
        """Whether what was said again is something else."""

    @property
    def sampled_anew(self) -> bool:
        """Whether another seed has decided on some of it."""
        return bool(self._times) and not self.again and not self._whole.params.sampling.greedy

    def goes_on(self, rest: Generation, *, failed: bool) -> int:
        """It does, with `rest`: since its replica has failed, or is left. Returns how many tokens
        the other has to read or to say before a new one."""
        self.sent = rest
        self._times += 1
        self._failures -= failed
        self._heard = 0
        return len(self._whole.prompt_ids) + len(self.ids)

    def new(self, delta: TokenDelta) -> TokenDelta | None:
        """What of a delta of an answer that is said again has not come before."""
        known = self.ids[self._heard : self._heard + len(delta.ids)]
        count = len(known)
        self._heard += len(delta.ids)
        missing = delta.final and self._heard < len(self.ids)
        self.differs = self.differs or missing or delta.ids[:count] != known.tolist()
        if self.differs or (count == len(delta.ids) and not delta.final):
            return None
        logprobs = None if delta.logprobs is None else delta.logprobs[count:]
        return replace(delta, ids=delta.ids[count:], logprobs=logprobs)

    def beyond(self, tokens: int) -> int:
        """How many of so many that come next have not come before."""
        if self.sent is None or not self.again:
            return tokens
        return max(self._heard + tokens - len(self.ids), 0)

    def rest(self, *, failed: bool) -> Generation | None:
        """What is left, as a generation of its own; None where that is nothing that can go on.

        Its id is another one: the engine that was left may not know yet that it was. A request may
        be what kills an engine, so after a bounded number of failures it is given to no other.
        """
        whole = self._whole
        if self._failures < failed or not self._allowed or whole.beams:
            return None
        if self.again and not failed:
            return None  # the other may say it otherwise, and this one is still there
        ids = array("i") if self.again else self.ids
        length = len(whole.prompt_ids) + len(ids)
        forms = {kind: None for kind, text in whole.forms.items() if text is None}
        forms = {kind: None for kind in forms if _takes(kind, length)}
        if not forms or len(self.ids) >= whole.max_tokens:
            return None
        sampling, times = whole.params.sampling, self._times + 1
        min_tokens = max(sampling.min_tokens - len(ids), 0)
        # What another engine's cache has is nothing that the client's prompt has found.
        params = replace(
            whole.params, sampling=replace(sampling, min_tokens=min_tokens), usage=False
        )
        return replace(
            whole,
            request_id=f"{whole.request_id}-{times}",
            prompt_ids=whole.prompt_ids + ids,
            max_tokens=whole.max_tokens - len(ids),
            seed=whole.seed if self.again else _another(whole.seed, times),
            params=params,
            text=None,
            forms=forms,
        )


def _takes(kind: object, length: int) -> bool:
    return isinstance(kind, ModelVariant) and length <= longest_prompt(kind.capabilities)


def _another(seed: int, times: int) -> int:
    """The same at each replay, and none that another choice begins with but by chance."""
    digest = blake2b(b"%d %d" % (seed, times), digest_size=8).digest()
    return int.from_bytes(digest, "big") & MAX_SEED

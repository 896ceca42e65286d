"""An answer whose replica fails, or is to be left, goes on at another one.

The other is asked for what is left, behind the prompt and all that the client has. A greedy answer
is then the one that it would have been. A sampled one goes on by another seed, and says so: the
random numbers that it would have had are known to the engine that is gone.
"""

from __future__ import annotations

from array import array
from dataclasses import replace
from hashlib import blake2b

from gateway.generation import MAX_SEED, Generation
from gateway.pipeline.fit import longest_prompt
from gateway.scheduling.kinds import Kind


class Continuation:
    """What has come of one generation, and what of it is left.

    Only what is made of token ids goes on: of a text nobody knows which ids it was. Nor does
    what is guided, as an engine begins with a guide at its beginning, nor a search, of which
    nothing is known before its end.
    """

    def __init__(self, generation: Generation, failures: int) -> None:
        """Goes on after so many `failures`; with 0, after nothing at all."""
        self._whole = generation
        self._failures = self._allowed = failures
        self._times = 0
        self.sent: Generation | None = None
        """What goes on now; None before that."""
        self.ids = array("i")
        """What has come, to be added to by who receives it."""

    @property
    def sampled_anew(self) -> bool:
        """Whether another seed has decided on some of it."""
        return bool(self._times) and not self._whole.params.sampling.greedy

    def goes_on(self, rest: Generation, *, failed: bool) -> None:
        """It does, with `rest`: since its replica has failed, or is left."""
        self.sent = rest
        self._times += 1
        self._failures -= failed

    def rest(self, *, failed: bool) -> Generation | None:
        """What is left, as a generation of its own; None where that is nothing that can go on.

        Its id is another one: the engine that was left may not know yet that it was. A request may
        be what kills an engine, so after a bounded number of failures it is given to no other.
        """
        whole = self._whole
        if self._failures < failed or not self._allowed:
            return None
        forms = {kind: None for kind, text in whole.forms.items() if text is None}
        length = len(whole.prompt_ids) + len(self.ids)
        forms = {kind: None for kind in forms if _takes(kind, length)}
        left = whole.max_tokens - len(self.ids)
        if not forms or left < 1 or whole.beams or whole.params.guide is not None:
            return None
        params = whole.params
        if params.sampling.min_tokens:
            min_tokens = max(params.sampling.min_tokens - len(self.ids), 0)
            params = replace(params, sampling=replace(params.sampling, min_tokens=min_tokens))
        times = self._times + 1
        return replace(
            whole,
            request_id=f"{whole.request_id}-{times}",
            prompt_ids=[*whole.prompt_ids, *self.ids],
            max_tokens=left,
            seed=_another(whole.seed, times),
            params=params,
            text=None,
            forms=forms,
        )


def _takes(kind: object, length: int) -> bool:
    return isinstance(kind, Kind) and length <= longest_prompt(kind.capabilities)


def _another(seed: int, times: int) -> int:
    """The same at each replay, and none that another choice begins with but by chance."""
    digest = blake2b(b"%d %d" % (seed, times), digest_size=8).digest()
    return int.from_bytes(digest, "big") & MAX_SEED

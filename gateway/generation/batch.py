"""The generations of one client's request, and what they used."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Protocol

from gateway.deltas import FinishReason, TextDelta, TokenLogprob
from gateway.generation.engine_request import Generation
from gateway.generation.options import ENFORCED, Caller, Unenforced
from gateway.stops import Stops


class RunningChoice(Protocol):
    """A choice that is being generated."""

    @property
    def tokens(self) -> int:
        """Number of tokens so far."""

    def cut_short(self) -> None:
        """End the choice now, as if it had reached its token limit."""


@dataclass(slots=True)
class Meter:
    """Usage of a request: ended choices, however they ended, and `running` ones.

    `reused_tokens` are the prompt tokens that were in the engine's cache, of the choice with the
    fewest. `finished` holds the finish reason of each choice that came to its end.
    """

    sent_prompts: int = 0
    """Prompts that the engine was given, as a bit mask over their positions in the request."""
    tokens: int = 0
    unreported_tokens: int = 0
    """Estimated tokens of aborted choices that were never read. Includes the possible output of
    beam searches and single responses, which the engine reports only at their end."""
    aborted_single_response: bool = False
    """True if an answer in a single response was aborted while its engine seemed to work on it."""
    running: list[RunningChoice] = field(default_factory=list)
    reused_tokens: int | None = None
    finished: list[FinishReason] = field(default_factory=list)
    fingerprints: dict[int, str] = field(default_factory=dict)
    """Fingerprints of the models that have answered, by the index of the generation. Those equal to
    the batch's own are left out."""
    resumptions: int = 0
    """Number of times that a choice was resumed on another replica."""
    first_token: float | None = None
    """Time of the first token of any choice, in `time.perf_counter`; None in a beam search."""
    stops: Stops | None = None
    """The stops of choices that were abandoned before their end; None if there were none."""

    @property
    def tokens_now(self) -> int:
        """Return the number of tokens, including those of running choices."""
        return self.tokens + sum([running.tokens for running in self.running])

    def add(self, last: TextDelta) -> None:
        """Add a choice, given its last delta."""
        self.tokens += last.tokens
        reused = last.stats.reused_tokens if last.stats else 0
        self.reused_tokens = (
            reused if self.reused_tokens is None else min(reused, self.reused_tokens)
        )
        if last.finish is not None:
            self.finished.append(last.finish)


@dataclass(slots=True, kw_only=True)
class Batch:
    """The generations of one request, one per choice: all of the first prompt, then the next.

    Each choice is an engine request of its own, so that a stop string ends only one choice
    (`num_return_sequences` shares one id and one stop). Only a beam search is one request for all
    choices of its prompt. `choices` counts all choices; `prompt_tokens` counts each prompt once.
    `deadline` is in the event loop's time, `timeout_s` seconds after the request arrived.
    `fingerprint` is that of a model that may answer; the real one is known once it has answered.
    """

    request_id: str
    generations: list[Generation]
    prompts: int
    choices: int
    prompt_tokens: int
    fingerprint: str
    caller: Caller
    timeout_s: float
    deadline: float
    unenforced: Unenforced = ENFORCED
    meter: Meter = field(default_factory=Meter)
    prompt_logprobs: dict[int, list[TokenLogprob]] = field(default_factory=dict)
    """Log probabilities of prompt tokens, by the index of the generation that shows them."""
    prompt_locks: defaultdict[int, asyncio.Lock] = field(
        default_factory=lambda: defaultdict(asyncio.Lock)
    )
    """Locks that let one choice of a prompt ask for these, by the index of the prompt's first
    generation."""

    @property
    def arrived_at(self) -> float:
        """Return the time at which the request arrived, in the event loop's time."""
        return self.deadline - self.timeout_s

    @property
    def first_token_by(self) -> float:
        """Return the latest time for the first token, in the event loop's time."""
        within = self.caller.first_token_within
        return self.deadline if within is None else min(self.deadline, self.arrived_at + within)

    def fingerprint_of(self, choice: int) -> str:
        """Return the fingerprint of the model that answers this choice, as far as known by now."""
        index = choice * len(self.generations) // self.choices
        return self.meter.fingerprints.get(index, self.fingerprint)

    @property
    def slots(self) -> int:
        """Return the number of engine slots that the request takes, one for each generated
        sequence."""
        return sum(generation.beams or 1 for generation in self.generations)

    @property
    def sent_prompt_tokens(self) -> int:
        """Return the number of tokens of the prompts that the engine was given, each prompt counted
        once."""
        of_prompt = len(self.generations) // self.prompts
        firsts = self.generations[::of_prompt]
        sent = [first for place, first in enumerate(firsts) if self.meter.sent_prompts >> place & 1]
        return sum([len(generation.prompt_ids) for generation in sent])

    def record_sent(self, index: int) -> None:
        """Record that an engine was given the prompt of this generation."""
        self.meter.sent_prompts |= 1 << index * self.prompts // len(self.generations)

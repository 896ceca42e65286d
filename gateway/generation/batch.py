"""All engine requests of one client request (`Batch`), and their token usage (`Meter`)."""

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
    """A choice of the response whose generation has started and not ended."""

    @property
    def tokens(self) -> int:
        """Number of tokens that were generated so far."""

    def cut_short(self) -> None:
        """End the choice now, in the same way as at its token limit."""


@dataclass(slots=True)
class Meter:
    """Token usage of one client request.

    Attributes:
        tokens: number of generated tokens of choices that have ended.
        running: choices that have not ended.
        reused_tokens: number of prompt tokens that were in the engine's cache. If the number
            differs between ended choices, the smallest number. None before the first choice has
            ended.
        finished: finish reasons of the choices that have ended. A choice that failed has no finish
            reason.
    """

    sent_prompts: int = 0
    """Bit mask of the prompts that were sent to an engine: bit n is set for prompt n."""
    tokens: int = 0
    unreported_tokens: int = 0
    """Estimated number of tokens of aborted choices that the gateway has not read from the engine.

    The engine returns a beam search or a non-streaming response only at the end. If such a response
    is aborted, the number of all its tokens is therefore estimated.
    """
    aborted_single_response: bool = False
    """True if a non-streaming response was aborted after the engine had probably started it."""
    running: list[RunningChoice] = field(default_factory=list)
    reused_tokens: int | None = None
    finished: list[FinishReason] = field(default_factory=list)
    fingerprints: dict[int, str] = field(default_factory=dict)
    """Fingerprint of the model that runs a generation, by the index of the generation.

    A generation without an entry has the fingerprint `Batch.fingerprint`.
    """
    resumptions: int = 0
    """Number of times that a choice was resumed on another replica."""
    first_token: float | None = None
    """Time of the first token of any choice, in seconds of `time.perf_counter`.

    None before the first token, and always None in a beam search."""
    stops: Stops | None = None
    """The requests to the engine to stop aborted choices; None if no choice was aborted."""

    @property
    def tokens_now(self) -> int:
        """Number of generated tokens so far, including the tokens of running choices."""
        return self.tokens + sum([running.tokens for running in self.running])

    def add(self, last: TextDelta) -> None:
        """Add the usage of a choice that has ended. `last` is the last delta of the choice."""
        self.tokens += last.tokens
        reused = last.stats.reused_tokens if last.stats else 0
        self.reused_tokens = (
            reused if self.reused_tokens is None else min(reused, self.reused_tokens)
        )
        if last.finish is not None:
            self.finished.append(last.finish)


@dataclass(slots=True, kw_only=True)
class Batch:
    """All generations of one client request: for each prompt in order, one generation per choice.

    Each choice is a separate engine request, so a stop string ends only this choice. With
    TensorRT-LLM's `num_return_sequences`, all choices would share an id and end together. A beam
    search is an exception: it is one engine request for all choices of a prompt.

    Attributes:
        prompts: number of prompts.
        choices: number of choices of all prompts together.
        prompt_tokens: number of prompt tokens, with each prompt counted once.
        fingerprint: fingerprint of a model that was ready when the request arrived. Replicas may
            have different models, so use `fingerprint_of` after the first token.
        timeout_s: the time limit in seconds.
        deadline: end of the time limit, in seconds of the event loop's clock.
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
    """Log probabilities of the prompt's tokens, by the index of the generation."""
    prompt_locks: defaultdict[int, asyncio.Lock] = field(
        default_factory=lambda: defaultdict(asyncio.Lock)
    )
    """Locks for loading `prompt_logprobs`, by the index of the prompt's first generation.

    The choices of a prompt share the prompt's log probabilities. One choice takes the lock and gets
    the log probabilities from the engine. The other choices wait for the result.
    """

    @property
    def arrived_at(self) -> float:
        """Time at which the request arrived, in seconds of the event loop's clock."""
        return self.deadline - self.timeout_s

    @property
    def first_token_by(self) -> float:
        """Latest time for the first token, in seconds of the event loop's clock."""
        within = self.caller.first_token_within
        return self.deadline if within is None else min(self.deadline, self.arrived_at + within)

    def fingerprint_of(self, choice: int) -> str:
        """Return the fingerprint of the model that generates the choice with the index `choice`.

        Before the first token of the choice, return `fingerprint`.
        """
        index = choice * len(self.generations) // self.choices
        return self.meter.fingerprints.get(index, self.fingerprint)

    @property
    def slots(self) -> int:
        """Number of engine slots that the request needs: one for each choice or beam."""
        return sum(generation.beams or 1 for generation in self.generations)

    @property
    def sent_prompt_tokens(self) -> int:
        """Number of tokens in the prompts that were sent to an engine. Each prompt counts once."""
        of_prompt = len(self.generations) // self.prompts
        firsts = self.generations[::of_prompt]
        sent = [first for place, first in enumerate(firsts) if self.meter.sent_prompts >> place & 1]
        return sum([len(generation.prompt_ids) for generation in sent])

    def record_sent(self, index: int) -> None:
        """Record that the prompt of the generation `index` was sent to an engine."""
        self.meter.sent_prompts |= 1 << index * self.prompts // len(self.generations)

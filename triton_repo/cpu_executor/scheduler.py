"""Scheduler, which chooses the requests that run, and the tokens of each iteration."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from triton_repo.cpu_executor.active import ActiveRequest
from triton_repo.cpu_executor.attention import QUERY_TILE
from triton_repo.cpu_executor.enums import CapacitySchedulerPolicy
from triton_repo.cpu_executor.kv_cache import BlockPool
from triton_repo.cpu_executor.sequence import Sequence

# Limit of prompt tokens in an iteration, shared by all prompts. A long prompt runs in several
# chunks, and therefore delays generating sequences only briefly. A chunk ends at a multiple of
# QUERY_TILE, or at the prompt's end.
PREFILL_TOKENS = 128


@dataclass(slots=True)
class Work:
    """Tokens of one sequence that the model processes in an iteration.

    ``last`` is True if the model's logits for these tokens determine the sequence's next token. If
    the tokens are a part of a prompt that ends before the prompt's end, ``last`` is False. For a
    prompt that is processed again after a pause, ``last`` is also False. ``in_prompt`` is True if
    the sequence has no generated tokens yet.
    """

    request: ActiveRequest
    sequence: Sequence
    tokens: list[int]
    last: bool
    in_prompt: bool


class Scheduler:
    """Scheduler that chooses which active requests run, and which tokens each iteration processes.

    The scheduler does not store the requests. The loop passes them to each call.
    """

    def __init__(
        self, policy: CapacitySchedulerPolicy, pool: BlockPool, max_num_tokens: int
    ) -> None:
        self._policy = policy
        self._pool = pool
        self._max_num_tokens = max_num_tokens

    def schedule(self, active: Seq[ActiveRequest]) -> tuple[list[ActiveRequest], int]:
        """Return the requests to start now, and the number of requests that were paused.

        ``active`` is in the order in which the requests were fetched. A paused request releases its
        KV caches, and starts again later, with its generated tokens as part of the prompt.
        """
        started = [r for r in active if r.is_started]
        paused = 0
        held = self._count_blocks(started)
        if self._policy == CapacitySchedulerPolicy.MAX_UTILIZATION:
            while held > self._pool.max_blocks and len(started) > 1:
                last = started.pop()
                last.pause()
                paused += 1
                held = self._count_blocks(started)
        starting: list[ActiveRequest] = []
        if self._policy != CapacitySchedulerPolicy.STATIC_BATCH or not started:
            starting = self._starting([r for r in active if not r.is_started], started)
        self._pool.use(held + self._count_blocks(starting))
        return starting, paused

    def _starting(
        self, waiting: Seq[ActiveRequest], started: Seq[ActiveRequest]
    ) -> list[ActiveRequest]:
        guaranteed = self._policy != CapacitySchedulerPolicy.MAX_UTILIZATION
        blocks = self._max_blocks if guaranteed else self._next_step_blocks
        claimed = sum(map(blocks, started))
        starting = []
        for request in waiting:
            # Skip a request whose LoRA weights or guide are still being prepared.
            if not request.is_ready:
                continue
            claimed += blocks(request)
            # Stop at the first request that does not fit. Otherwise small requests could always
            # start before a large request, and the large request would wait forever.
            if claimed > self._pool.max_blocks:
                break
            starting.append(request)
        return starting

    def _count_blocks(self, requests: Seq[ActiveRequest]) -> int:
        return sum(map(self._next_step_blocks, requests))

    def _next_step_blocks(self, request: ActiveRequest) -> int:
        """Return the number of blocks that a request needs for its next step."""
        length = len(request.prompt)
        return sum(self._pool.blocks(length + len(s.tokens)) for s in request.list_unfinished())

    def _max_blocks(self, request: ActiveRequest) -> int:
        """Return the largest number of blocks that a request may ever need."""
        tokens = len(request.prompt) + request.max_tokens
        return len(request.list_unfinished()) * self._pool.blocks(tokens)

    def plan(self, running: Seq[ActiveRequest]) -> list[Work]:
        """Return the tokens to process in one iteration, one `Work` per sequence.

        `Work` objects with a single token come first, as ``CausalLM.forward`` requires.
        """
        steps: list[Work] = []
        pieces: list[Work] = []
        prompts: list[tuple[ActiveRequest, Sequence]] = []
        for request in running:
            length = len(request.prompt)
            stepping = []
            for sequence in request.sequences:
                if sequence.cache is None:
                    continue
                if sequence.tokens and sequence.cache.length + 1 == length + len(sequence.tokens):
                    stepping.append(Work(request, sequence, sequence.tokens[-1:], True, False))
                else:
                    prompts.append((request, sequence))
            # A beam search needs one step of all beams at once. After a pause, wait until the
            # prompts of all beams have been processed again.
            if request.beam_width == 1 or len(stepping) == request.beam_width:
                steps += stepping
        # Allow at least QUERY_TILE prompt tokens. A chunk that does not reach the prompt's end must
        # end at a multiple of QUERY_TILE. With a smaller budget, no such chunk might be possible.
        budget = max(QUERY_TILE, min(PREFILL_TOKENS, self._max_num_tokens - len(steps)))
        for request, sequence in prompts:
            assert sequence.cache is not None
            done = sequence.cache.length
            # After a pause, the generated tokens are part of the prompt, except the last token. An
            # ordinary decode step processes the last token, and chooses the next token.
            context = len(request.prompt) + max(0, len(sequence.tokens) - 1)
            count = min(context - done, budget)
            if done + count < context:
                count -= (done + count) % QUERY_TILE
            if count <= 0:
                break
            budget -= count
            work = Work(
                request,
                sequence,
                request.context_slice(sequence, done, done + count),
                last=done + count == context and not sequence.tokens,
                in_prompt=not sequence.tokens,
            )
            (steps if count == 1 else pieces).append(work)
        return steps + pieces

"""A request that the executor's loop has fetched from the queue, and the responses to it."""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence as Seq
from concurrent.futures import Future
from datetime import timedelta

import numpy as np
from numpy.typing import NDArray

from triton_repo.cpu_executor.enums import FinishReason, RequestStage
from triton_repo.cpu_executor.guide import GuideState
from triton_repo.cpu_executor.lora import CachedAdapter
from triton_repo.cpu_executor.mailbox import Queued
from triton_repo.cpu_executor.result import (
    KvCacheMetrics,
    RequestPerfMetrics,
    Response,
    Result,
    SpeculativeDecodingMetrics,
)
from triton_repo.cpu_executor.sequence import NOT_FINISHED, Beams, Sequence
from triton_repo.cpu_executor.stats import RequestStats
from triton_repo.cpu_executor.torch_tensors import as_torch
from triton_repo.cpu_executor.words import StopWords


class ActiveRequest:
    """A request that the executor's loop has fetched and that has no final response yet.

    ``max_tokens`` may be below the number that the client requested, because the engine's
    ``max_seq_len`` limits prompt plus output.
    """

    def __init__(
        self,
        entry: Queued,
        max_tokens: int,
        draft: Seq[int] = (),
        prompt_table: NDArray[np.float32] | None = None,
    ) -> None:
        request = entry.request
        sampling, output = request.sampling_config, request.output_config
        self.id = entry.id
        self.client_id = request.client_id
        self.arrival = entry.arrival
        self.request = request
        self.sampling = sampling
        self.output = output
        self.prompt = request.input_token_ids
        self.max_tokens = max_tokens
        self.draft = list(draft)
        self.prompt_table = prompt_table
        self.end_id = -1 if request.end_id is None else request.end_id
        self.end_ids = frozenset([self.end_id] if self.end_id >= 0 else [])
        self.beam_width = sampling.beam_width
        self.streaming = request.streaming
        # For a beam search, return all tokens of each beam in every response. A step may replace
        # the earlier tokens of a beam, so a client could not append only the new tokens.
        self.all_tokens = request.return_all_generated_tokens or self.beam_width > 1
        count = self.beam_width if self.beam_width > 1 else entry.sequences
        self.sequences = [Sequence(i) for i in range(count)]
        self.context_logits: NDArray[np.float32] | None = None
        self.blocks = KvCacheMetrics()
        self.metrics: RequestPerfMetrics | None = None
        if output.return_perf_metrics:
            self.metrics = RequestPerfMetrics(kv_cache_metrics=self.blocks)
        if self.metrics is not None:
            self.metrics.timing_metrics.arrival_time = timedelta(seconds=self.arrival)
        self.beams: Beams | None = None
        self.stop_words: StopWords | None = None
        self.adapter: CachedAdapter | None = None
        self.guide: Future[GuideState] | None = None
        self.failure: str | None = None
        self.first_scheduled: float | None = None
        lora = request.lora_config
        self.task_id = None if lora is None else lora.task_id
        # The request may reuse only stored KV cache blocks with the same `reuse_key`. The contents
        # of a block depend on the adapter and on the prompt table. The key therefore consists of
        # the adapter's task id, and of the tokens' extra ids, which identify the prompt table.
        tuning = request.prompt_tuning_config
        extra_ids = None if tuning is None else tuning.input_token_extra_ids
        self.reuse_key = self.task_id if extra_ids is None else (self.task_id, extra_ids)
        self._unreported = count

    @property
    def is_done(self) -> bool:
        """True if all sequences have ended and their last responses were built."""
        return self._unreported == 0

    @property
    def is_ready(self) -> bool:
        """True if the preparation of the LoRA adapter and of the guide (grammar) has ended.

        A preparation that has failed has also ended.
        """
        return (self.adapter is None or self.adapter.is_ready) and (
            self.guide is None or self.guide.done()
        )

    @property
    def is_started(self) -> bool:
        """True if at least one sequence has a KV cache."""
        return any(s.cache is not None for s in self.sequences)

    @property
    def slots(self) -> int:
        """Number of batch slots that the request occupies.

        This is the number of samples that have not ended, or 1 for a beam search.
        """
        return len(self.list_unfinished()) if self.beam_width == 1 else 1

    def schedule(self) -> None:
        """Record the time at which the request was first scheduled."""
        self.first_scheduled = time.monotonic()
        if self.metrics is not None:
            timing = self.metrics.timing_metrics
            timing.first_scheduled_time = timedelta(seconds=self.first_scheduled)

    def list_unfinished(self) -> list[Sequence]:
        return [s for s in self.sequences if s.finish is NOT_FINISHED]

    def context_slice(self, sequence: Sequence, start: int, end: int) -> list[int]:
        """Return the token ids ``[start, end)`` of the prompt followed by the sequence's output."""
        length = len(self.prompt)
        if end <= length:
            return self.prompt[start:end]
        return (self.prompt + sequence.tokens)[start:end]

    def pause(self) -> None:
        """Release the KV caches of all sequences, to let other requests use the blocks.

        When the scheduler starts the request again, the generated ids are processed as part of the
        prompt.
        """
        for sequence in self.sequences:
            sequence.cache = None

    def cancel(self, reason: FinishReason = FinishReason.CANCELLED) -> list[Response]:
        """End all unfinished sequences, drop their unsent tokens, and return the last responses."""
        for sequence in self.sequences:
            if not sequence.reported_end:
                sequence.finish = reason
                sequence.tokens = []
                sequence.reported_tokens = 0
                sequence.logits = []
                sequence.cache = None
        return self.responses()

    def fail(self, text: str) -> Response:
        self._unreported = 0
        return Response(self.id, text, self.client_id)

    def responses(self) -> list[Response]:
        """Return responses with the output since the last call.

        If the request has failed, the first call returns the error response, and later calls return
        no responses.
        """
        if self.failure is not None:
            return [] if self.is_done else [self.fail(self.failure)]
        if self.beam_width > 1:
            return self._beam_response()
        built = []
        for sequence in self.sequences:
            ended = sequence.finish is not NOT_FINISHED
            new = len(sequence.tokens) > sequence.reported_tokens
            if sequence.reported_end or not (ended or (new and self.streaming)):
                continue
            if not ended and self.draft and self._is_verifying(sequence):
                continue
            if ended:
                sequence.reported_end = True
                self._unreported -= 1
            result = self._result([sequence], ended)
            result.sequence_index = sequence.index
            built.append(Response(self.id, result, self.client_id))
            sequence.reported_tokens = len(sequence.tokens)
        return built

    def _beam_response(self) -> list[Response]:
        ended = all(s.finish is not NOT_FINISHED for s in self.sequences)
        first = self.sequences[0]
        new = len(first.tokens) > first.reported_tokens
        if self.is_done or not (ended or (new and self.streaming)):
            return []
        first.reported_tokens = len(first.tokens)
        if ended:
            self._unreported = 0
        shown = self.sampling.num_return_sequences or self.beam_width
        result = self._result(self.sequences[:shown], ended)
        return [Response(self.id, result, self.client_id)]

    def _is_verifying(self, sequence: Sequence) -> bool:
        """Return True while all generated tokens equal the draft tokens.

        No output is sent as long as this is True. TensorRT-LLM verifies all draft tokens in one
        step, and sends the accepted tokens in one response. Here each step generates a single
        token, so accepted tokens are held back until they can be sent together.
        """
        count = len(sequence.tokens)
        return count <= len(self.draft) and sequence.tokens == self.draft[:count]

    def _count_accepted(self, sequence: Sequence) -> int:
        """Return the number of draft tokens that equal the sequence's first generated tokens."""
        pairs = enumerate(zip(self.draft, sequence.tokens, strict=False))
        shared = min(len(self.draft), len(sequence.tokens))
        return next((i for i, (drafted, chosen) in pairs if drafted != chosen), shared)

    def _result(self, sequences: list[Sequence], ended: bool) -> Result:
        accepted = self._count_accepted(sequences[0]) if self.draft else 0
        result = Result(
            is_final=self._unreported == 0,
            is_sequence_final=ended,
            output_token_ids=[self._ids(s) for s in sequences],
            finish_reasons=[s.finish for s in sequences],
            decoding_iter=max(len(s.tokens) for s in sequences) - accepted,
            context_logits=None if self.context_logits is None else as_torch(self.context_logits),
        )
        if self.output.return_log_probs:
            result.cum_log_probs = [s.cum_log_prob for s in sequences]
            result.log_probs = [list(s.log_probs) for s in sequences]
        if self.output.return_generation_logits:
            logits = self._generation_logits(sequences)
            result.generation_logits = None if logits is None else as_torch(logits)
        if self.metrics is not None:
            result.request_perf_metrics = copy.deepcopy(self.metrics)
            if self.draft:
                result.request_perf_metrics.speculative_decoding = SpeculativeDecodingMetrics(
                    acceptance_rate=accepted / len(self.draft),
                    total_accepted_draft_tokens=accepted,
                    total_draft_tokens=len(self.draft),
                )
        return result

    def _ids(self, sequence: Sequence) -> list[int]:
        if self.streaming:
            start = 0 if self.all_tokens else sequence.reported_tokens
            return sequence.tokens[start:]
        if self.output.exclude_input_from_output:
            return list(sequence.tokens)
        return self.prompt + sequence.tokens

    def _generation_logits(self, sequences: list[Sequence]) -> NDArray[np.float32] | None:
        if self.streaming:
            # If a stream has several beams, return no logits, as TensorRT-LLM does.
            if self.beam_width > 1 or not sequences[0].logits:
                return None
            new, sequences[0].logits = sequences[0].logits, []
            return np.stack(new)[:, None, :]
        if not any(s.logits for s in sequences):
            return None
        vocab = next(len(s.logits[0]) for s in sequences if s.logits)
        # Return all `max_tokens` rows even if generation stopped early, as TensorRT-LLM does.
        buffer = np.zeros((len(sequences), self.max_tokens, vocab), np.float32)
        for row, sequence in zip(buffer, sequences, strict=True):
            if sequence.logits:
                row[: len(sequence.logits)] = sequence.logits
        return buffer

    def stats(self) -> RequestStats:
        """Return the request's statistics after the most recent iteration."""
        longest = max(self.sequences, key=lambda s: len(s.tokens))
        count, cache = len(longest.tokens), longest.cache
        ended = not self.list_unfinished()
        if ended:
            stage = RequestStage.GENERATION_COMPLETE
        elif count:
            stage = RequestStage.GENERATION_IN_PROGRESS
        else:
            stage = RequestStage.CONTEXT_IN_PROGRESS if self.is_started else RequestStage.QUEUED
        done = len(self.prompt) if count or cache is None else cache.length
        return RequestStats(
            id=self.id,
            stage=stage,
            context_prefill_position=0 if stage is RequestStage.QUEUED else done,
            num_generated_tokens=count,
            avg_num_decoded_tokens_per_iter=count / max(1, count - self._count_accepted(longest)),
            # A finished request has no KV cache, but this iteration still processed it.
            scheduled=self.is_started or ended,
            paused=count > 0 and not self.is_started and not ended,
            alloc_total_blocks_per_request=self.blocks.num_total_allocated_blocks,
            alloc_new_blocks_per_request=self.blocks.num_new_allocated_blocks,
            reused_blocks_per_request=self.blocks.num_reused_blocks,
            missed_blocks_per_request=self.blocks.num_missed_blocks,
            kv_cache_hit_rate_per_request=self.blocks.kv_cache_hit_rate,
        )

    def note_token(self, iteration: int) -> None:
        """Record in the metrics when, and in which iteration, a token was generated."""
        if self.metrics is None:
            return
        now = timedelta(seconds=time.monotonic())
        timing = self.metrics.timing_metrics
        if self.metrics.first_iter is None:
            timing.first_token_time = now
            self.metrics.first_iter = iteration
        timing.last_token_time = now
        self.metrics.iter = self.metrics.last_iter = iteration

"""A fetched request and the responses that its sequences make."""

from __future__ import annotations

import copy
import time
from concurrent.futures import Future
from datetime import timedelta

import numpy as np
from numpy.typing import NDArray

from triton_repo.cpu_executor.enums import FinishReason
from triton_repo.cpu_executor.guide import Guide
from triton_repo.cpu_executor.lora import CachedAdapter
from triton_repo.cpu_executor.mailbox import Queued
from triton_repo.cpu_executor.result import RequestPerfMetrics, Response, Result
from triton_repo.cpu_executor.sequence import NOT_FINISHED, Beams, Sequence
from triton_repo.cpu_executor.words import StopWords


class ActiveRequest:
    """A request between fetch and its final response.

    ``max_tokens`` may be smaller than the request's, since it is cut to the engine's
    ``max_seq_len``.
    """

    def __init__(self, entry: Queued, max_tokens: int) -> None:
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
        self.end_id = -1 if request.end_id is None else request.end_id
        self.end_ids = frozenset([self.end_id] if self.end_id >= 0 else [])
        self.beam_width = sampling.beam_width
        self.streaming = request.streaming
        # Beams may be reordered in every step, so a delta would mean nothing.
        self.all_tokens = request.return_all_generated_tokens or self.beam_width > 1
        count = self.beam_width if self.beam_width > 1 else entry.sequences
        self.sequences = [Sequence(i) for i in range(count)]
        self.context_logits: NDArray[np.float32] | None = None
        self.metrics = RequestPerfMetrics() if output.return_perf_metrics else None
        if self.metrics is not None:
            self.metrics.timing_metrics.arrival_time = timedelta(seconds=self.arrival)
        self.beams: Beams | None = None
        self.stop_words: StopWords | None = None
        self.adapter: CachedAdapter | None = None
        self.guide: Future[Guide] | None = None
        self.failure: str | None = None
        self.first_scheduled: float | None = None
        lora = request.lora_config
        self.task_id = None if lora is None else lora.task_id
        self._unreported = count

    @property
    def is_done(self) -> bool:
        """Every sequence has ended and its last response was built."""
        return self._unreported == 0

    @property
    def is_ready(self) -> bool:
        """The LoRA adapter and the guide, if any, can be used."""
        return (self.adapter is None or self.adapter.is_ready) and (
            self.guide is None or self.guide.done()
        )

    @property
    def is_started(self) -> bool:
        """Some sequence has a KV cache."""
        return any(s.cache is not None for s in self.sequences)

    @property
    def slots(self) -> int:
        """How much of the batch size it takes: its running samples, or one for a beam search."""
        return len(self.unfinished()) if self.beam_width == 1 else 1

    def schedule(self) -> None:
        """Note the first start."""
        self.first_scheduled = time.monotonic()
        if self.metrics is not None:
            timing = self.metrics.timing_metrics
            timing.first_scheduled_time = timedelta(seconds=self.first_scheduled)

    def unfinished(self) -> list[Sequence]:
        return [s for s in self.sequences if s.finish is NOT_FINISHED]

    def context_slice(self, sequence: Sequence, start: int, end: int) -> list[int]:
        """Ids ``[start, end)`` of a sequence's prompt and generated ids."""
        length = len(self.prompt)
        if end <= length:
            return self.prompt[start:end]
        return (self.prompt + sequence.tokens)[start:end]

    def pause(self) -> None:
        """Give up the KV caches; the generated ids become part of the prompt later."""
        for sequence in self.sequences:
            sequence.cache = None

    def cancel(self, reason: FinishReason = FinishReason.CANCELLED) -> list[Response]:
        """End all running sequences; their generated tokens are dropped."""
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
        """Responses for what is new since the last call, or the error that ends the request."""
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

    def _result(self, sequences: list[Sequence], ended: bool) -> Result:
        result = Result(
            is_final=self._unreported == 0,
            is_sequence_final=ended,
            output_token_ids=[self._ids(s) for s in sequences],
            finish_reasons=[s.finish for s in sequences],
            decoding_iter=max(len(s.tokens) for s in sequences),
            context_logits=self.context_logits,
        )
        if self.output.return_log_probs:
            result.cum_log_probs = [s.cum_log_prob for s in sequences]
            result.log_probs = [list(s.log_probs) for s in sequences]
        if self.output.return_generation_logits:
            result.generation_logits = self._generation_logits(sequences)
        if self.metrics is not None:
            result.request_perf_metrics = copy.deepcopy(self.metrics)
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
            # Switched off for several beams, as upstream does.
            if self.beam_width > 1 or not sequences[0].logits:
                return None
            new, sequences[0].logits = sequences[0].logits, []
            return np.stack(new)[:, None, :]
        if not any(s.logits for s in sequences):
            return None
        vocab = next(len(s.logits[0]) for s in sequences if s.logits)
        # Upstream hands out the whole buffer, also when generation stopped early.
        buffer = np.zeros((len(sequences), self.max_tokens, vocab), np.float32)
        for row, sequence in zip(buffer, sequences, strict=True):
            if sequence.logits:
                row[: len(sequence.logits)] = sequence.logits
        return buffer

    def note_token(self, iteration: int) -> None:
        """Record the time of a step that made a token."""
        if self.metrics is None:
            return
        now = timedelta(seconds=time.monotonic())
        timing = self.metrics.timing_metrics
        if self.metrics.first_iter is None:
            timing.first_token_time = now
            self.metrics.first_iter = iteration
        timing.last_token_time = now
        self.metrics.iter = self.metrics.last_iter = iteration

"""The executor's loop thread, which runs requests from their fetch to their end.

`RequestLoop` has the code that real models and the synthetic engine share. Each iteration ends
cancelled requests, fetches new requests, advances all active requests by one step, and publishes
responses and statistics. New requests can therefore start in every iteration, and the batch slots
of finished requests are free at once.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

from triton_repo.cpu_executor.active import ActiveRequest
from triton_repo.cpu_executor.admission import (
    FETCH_ERROR,
    AdmissionLimits,
    RefusedError,
    admit,
    refuse,
)
from triton_repo.cpu_executor.engine import CpuEngineConfig
from triton_repo.cpu_executor.enums import BatchingType
from triton_repo.cpu_executor.executor_config import ExecutorConfig
from triton_repo.cpu_executor.lora import LoraCache, LoraError
from triton_repo.cpu_executor.mailbox import Mailbox, Queued
from triton_repo.cpu_executor.result import Response
from triton_repo.cpu_executor.stats import (
    InflightBatchingStats,
    IterationStats,
    KvCacheStats,
    RequestStatsPerIteration,
    StaticBatchingStats,
    timestamp,
)

if TYPE_CHECKING:
    from triton_repo.cpu_executor.guide_compiler import GuideCompiler

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class IterationProgress:
    """Counts of the requests and tokens that one iteration processed, for the statistics."""

    scheduled: int = 0
    context_requests: int = 0
    context_tokens: int = 0
    generation_requests: int = 0
    generation_tokens: int = 0
    paused: int = 0


class RequestLoop(ABC):
    """Base class of the executor's loops. Subclasses define one step of the active requests.

    A loop runs until the mailbox is closed and all requests have ended.
    """

    def __init__(
        self,
        config: CpuEngineConfig,
        settings: ExecutorConfig,
        mailbox: Mailbox,
        *,
        limits: AdmissionLimits,
        lora: LoraCache | None,
        guides: GuideCompiler | None,
    ) -> None:
        self._config = config
        self._mailbox = mailbox
        self._limits = limits
        self._lora = lora
        self._guides = guides
        self._static = settings.batching_type == BatchingType.STATIC
        self._active: list[ActiveRequest] = []
        self._iteration = 0
        self._least_s = config.least_iteration_ms / 1000

    @abstractmethod
    def _advance(self) -> IterationProgress | None:
        """Run one step of the active requests. Return None if no request could run."""

    @abstractmethod
    def _pause(self) -> None:
        """Sleep briefly. Called if no active request could run."""

    @abstractmethod
    def _kv_cache_stats(self) -> KvCacheStats: ...

    @abstractmethod
    def _memory(self) -> int:
        """Return the size of weights and caches in bytes."""

    def run(self) -> None:
        """Run the loop. This is the main function of the loop thread."""
        try:
            while self._mailbox.wait_for_work(0 if self._active else None) or self._active:
                self._run_iteration()
        finally:
            # Wake all waiting callers, also if the loop ends by an error. Otherwise they would wait
            # forever.
            self._mailbox.finish()
            if self._lora is not None:
                self._lora.close()
            if self._guides is not None:
                self._guides.close()

    def _run_iteration(self) -> None:
        started = time.monotonic()
        stats = IterationStats()
        responses = self._end_cancelled()
        responses += self._fetch(stats)
        responses += self._refuse_unprepared()
        progress = None
        try:
            progress = self._advance()
            responses += [x for r in self._active for x in r.responses()]
        except Exception as error:
            # Fail all active requests after an error in a step, as TensorRT-LLM does.
            log.exception("error in a step with %d active requests", len(self._active))
            text = f"Encountered an error in forwardAsync function: {error}"
            responses += [r.fail(text) for r in self._active if not r.is_done]
        stats.num_active_requests = len(self._active)
        requests = None
        if self._mailbox.records_request_stats:
            requests = RequestStatsPerIteration(self._iteration, [r.stats() for r in self._active])
        done = [r for r in self._active if r.is_done]
        if done:
            self._active = [r for r in self._active if not r.is_done]
            self._release(done)
        stats.num_completed_requests = len(done)
        if progress is not None:
            stats.iter_latency_ms = (time.monotonic() - started) * 1000
            self._mailbox.publish(responses, self._complete_stats(stats, progress), requests)
            self._iteration += 1
        else:
            self._mailbox.publish(responses)
        if not self._active:
            # No request is left. Publish statistics of an empty iteration, with which the metrics
            # return to 0.
            self._mailbox.publish([], self._complete_stats(IterationStats(), IterationProgress()))
        elif progress is None:
            self._pause()
        elif (left := started + self._least_s - time.monotonic()) > 0:
            time.sleep(left)

    def _end_cancelled(self) -> list[Response]:
        cancelled = self._mailbox.pending_cancels
        if not cancelled:
            return []
        return [x for r in self._active if r.id in cancelled for x in r.cancel()]

    def _fetch(self, stats: IterationStats) -> list[Response]:
        if not self._mailbox.queue_length:
            return []
        running = [r for r in self._active if not r.is_done]
        free = self._limits.max_batch_size - sum(r.slots for r in running)
        beam_width = running[0].beam_width if running else None

        def admits(entry: Queued) -> bool:
            nonlocal free, beam_width
            width = entry.request.sampling_config.beam_width
            if entry.sequences > self._limits.max_batch_size:
                return True  # fetch a request that can never fit, because `admit` refuses it
            # Fetch no request of another beam width until the running batch is empty.
            if entry.sequences > free or beam_width not in (None, width):
                return False
            free -= entry.sequences
            beam_width = width
            return True

        refused = []
        for entry in self._mailbox.fetch(admits):
            try:
                self._active.append(self._activate(entry))
                stats.num_new_active_requests += 1
                stats.new_active_requests_queue_latency_ms += (
                    time.monotonic() - entry.arrival
                ) * 1000
            except RefusedError as error:
                refused.append(Response(entry.id, str(error), entry.request.client_id))
            except Exception as error:
                # Refuse only this request: its error must not stop the loop.
                log.exception("error when fetching request %d", entry.id)
                text = f"{FETCH_ERROR}{error}"
                refused.append(Response(entry.id, text, entry.request.client_id))
        return refused

    def _activate(self, entry: Queued) -> ActiveRequest:
        request = admit(entry, self._config, self._limits)
        if self._static and request.streaming:
            # With static batching, send one complete response without the prompt, as TensorRT-LLM
            # does.
            request.streaming = False
            request.output.exclude_input_from_output = True
        guide = entry.request.guided_decoding_params
        if guide is not None:
            if self._guides is None:
                raise refuse(
                    "Request is specified with GuidedDecodingParams, but GuidedDecoder is not "
                    "setup. Please provide a valid GuidedDecodingConfig to setup GuidedDecoder."
                )
            request.guide = self._guides.compile(guide)
            request.end_ids |= self._guides.stop_ids
        lora = entry.request.lora_config
        if lora is not None:
            if self._lora is None:
                raise RefusedError(f"{FETCH_ERROR}the engine was built without LoRA")
            try:
                request.adapter = self._lora.acquire(lora)
            except LoraError as error:
                text = str(error) if error.bare else f"{FETCH_ERROR}{error}"
                raise RefusedError(text) from error
        return request

    def _refuse_unprepared(self) -> list[Response]:
        """End the requests whose LoRA adapter could not be prepared.

        Return their error responses.
        """
        refused = []
        for request in self._active:
            if request.is_done or request.is_started or not request.is_ready:
                continue
            adapter = request.adapter
            if adapter is not None and adapter.error is not None and self._lora is not None:
                self._lora.forget(adapter)
                what = f"Error storing task={adapter.task_id} in PEFT cache -- {adapter.error}"
                refused.append(request.fail(FETCH_ERROR + what))
        return refused

    def _release(self, done: list[ActiveRequest]) -> None:
        for request in done:
            for sequence in request.sequences:
                sequence.cache = None
            if request.guide is not None:
                request.guide.cancel()
            if request.adapter is not None and self._lora is not None:
                self._lora.release(request.adapter)

    def _complete_stats(self, stats: IterationStats, progress: IterationProgress) -> IterationStats:
        stats.timestamp = timestamp()
        stats.iter = self._iteration
        stats.max_num_active_requests = self._limits.max_batch_size
        stats.num_queued_requests = self._mailbox.queue_length
        stats.cpu_mem_usage = self._memory()
        stats.kv_cache_stats = self._kv_cache_stats()
        if self._static:
            stats.static_batching_stats = StaticBatchingStats(
                num_scheduled_requests=progress.scheduled,
                num_context_requests=progress.context_requests,
                num_ctx_tokens=progress.context_tokens,
                num_gen_tokens=progress.generation_tokens,
                empty_gen_slots=self._limits.max_batch_size - progress.generation_requests,
            )
        else:
            stats.inflight_batching_stats = InflightBatchingStats(
                num_scheduled_requests=progress.scheduled,
                num_context_requests=progress.context_requests,
                num_gen_requests=progress.generation_requests,
                num_paused_requests=progress.paused,
                num_ctx_tokens=progress.context_tokens,
                avg_num_decoded_tokens_per_iter=1.0 if progress.generation_requests else 0.0,
            )
        return stats

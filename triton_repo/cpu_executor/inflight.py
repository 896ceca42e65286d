"""The executor's loop for real models, with in-flight batching.

Each iteration is one forward pass over the tokens of all running requests.
"""

from __future__ import annotations

import time

import numpy as np
from numpy.typing import NDArray

from triton_repo.cpu_executor.active import ActiveRequest
from triton_repo.cpu_executor.admission import AdmissionLimits
from triton_repo.cpu_executor.causal_lm import CausalLM, Chunk
from triton_repo.cpu_executor.decoder import SequenceDecoder
from triton_repo.cpu_executor.engine import CpuEngineConfig
from triton_repo.cpu_executor.enums import BatchingType, CapacitySchedulerPolicy, FinishReason
from triton_repo.cpu_executor.executor_config import ExecutorConfig
from triton_repo.cpu_executor.kv_cache import (
    BlockPool,
    SequenceCache,
    block_bytes,
    default_max_tokens,
)
from triton_repo.cpu_executor.loop import IterationProgress, RequestLoop
from triton_repo.cpu_executor.lora import LoraCache
from triton_repo.cpu_executor.mailbox import Mailbox
from triton_repo.cpu_executor.scheduler import Scheduler, Work
from triton_repo.cpu_executor.sequence import Sequence
from triton_repo.cpu_executor.stats import KvCacheStats

# Polling interval, in seconds, while every active request waits for its LoRA weights or guide.
PREPARATION_POLL_SECONDS = 0.002


class InflightLoop(RequestLoop):
    """Loop that takes requests from a `Mailbox`, and runs a model on them."""

    def __init__(
        self, model: CausalLM, config: CpuEngineConfig, settings: ExecutorConfig, mailbox: Mailbox
    ) -> None:
        kv_cache = settings.kv_cache_config
        size = config.tokens_per_block
        max_tokens = kv_cache.max_tokens or default_max_tokens(
            config, kv_cache.free_gpu_memory_fraction
        )
        # Reuse KV cache blocks only if the engine was built with paged context FMHA. In
        # TensorRT-LLM, only the attention kernels of this option can reuse blocks.
        reuse = kv_cache.enable_block_reuse and config.use_paged_context_fmha
        self._pool = BlockPool(max(1, max_tokens // size), size, reuse)
        policy = settings.scheduler_config.capacity_scheduler_policy
        if settings.batching_type == BatchingType.STATIC:
            policy = CapacitySchedulerPolicy.STATIC_BATCH
        limits = AdmissionLimits(
            max_input_len=config.max_input_len,
            max_seq_len=min(config.max_seq_len, self._pool.max_blocks * size),
            max_beam_width=settings.max_beam_width,
            max_batch_size=min(
                settings.max_batch_size or config.max_batch_size, config.max_batch_size
            ),
            max_blocks=self._pool.max_blocks,
            tokens_per_block=size,
            block_reuse=reuse,
            unchunked_max_utilization=(
                policy == CapacitySchedulerPolicy.MAX_UTILIZATION
                and not settings.enable_chunked_context
            ),
        )
        lora = None
        if config.lora_target_modules:
            lora = LoraCache(config, model, settings.peft_cache_config)
        guides = None
        if settings.guided_decoding_config is not None:
            # Import here: only guided decoding needs llguidance.
            from triton_repo.cpu_executor.guide_compiler import GuideCompiler  # noqa: PLC0415

            guides = GuideCompiler(settings.guided_decoding_config, config.vocab_size)
        super().__init__(config, settings, mailbox, limits=limits, lora=lora, guides=guides)
        self._model = model
        self._scheduler = Scheduler(
            policy, self._pool, settings.max_num_tokens or config.max_num_tokens
        )
        self._decoder = SequenceDecoder(config.vocab_size, settings.normalize_log_probs)

    def _advance(self) -> IterationProgress | None:
        running = [r for r in self._active if not r.is_done]
        starting, paused = self._scheduler.schedule(running)
        for request in starting:
            self._start(request)
        works = self._scheduler.plan([r for r in running if r.is_started])
        if not works:
            return None
        self._step(works)
        context = [work for work in works if work.in_prompt]
        requests = {work.request.id for work in works}
        in_context = {work.request.id for work in context}
        return IterationProgress(
            scheduled=len(requests),
            context_requests=len(in_context),
            context_tokens=sum(len(work.tokens) for work in context),
            generation_requests=len(requests) - len(in_context),
            generation_tokens=len(works) - len(context),
            paused=paused,
        )

    def _pause(self) -> None:
        time.sleep(PREPARATION_POLL_SECONDS)

    def _kv_cache_stats(self) -> KvCacheStats:
        if not self._active:
            self._pool.use(0)
        return self._pool.stats()

    def _memory(self) -> int:
        blocks = self._pool.used + self._pool.stored_count
        return self._model.parameter_bytes + blocks * block_bytes(self._config)

    def _start(self, request: ActiveRequest) -> None:
        """Allocate the KV caches with which a request starts, or starts again after a pause.

        At first, only the first sequence gets a cache, because all sequences have the same prompt.
        After a pause, each unfinished sequence gets a cache.
        """
        if request.first_scheduled is None:
            request.schedule()
            self._decoder.prepare(request)
        fresh = [s for s in request.list_unfinished() if not s.tokens][:1]
        for sequence in fresh or request.list_unfinished():
            context = request.prompt + sequence.tokens
            sequence.cache = SequenceCache(self._config, len(context) + 1)
            reused = 0
            # Do not reuse blocks if the client requests context logits, because the model computes
            # no logits for the tokens of reused blocks.
            if not request.output.return_context_logits:
                reused = self._pool.load(sequence.cache, context, request.reuse_key)
            self._pool.count(len(context), reused, request.blocks)

    def _step(self, works: list[Work]) -> None:
        chunks = [self._chunk(work) for work in works]
        logits = self._model.forward(chunks)
        ready: list[tuple[ActiveRequest, Sequence]] = []
        rows: list[int] = []
        end = 0
        for work, chunk in zip(works, chunks, strict=True):
            end += chunk.logits
            if work.in_prompt:
                self._after_prompt(work, logits[end - chunk.logits : end])
            if work.last:
                choosing = self._split(work)
                ready += choosing
                rows += [end - 1] * len(choosing)
        if ready:
            # The decoder modifies rows in place, and several samples of a request may use the same
            # row. Select the rows with a list of indices, because numpy then copies each row.
            self._decoder.decode(ready, logits[rows])
        for request, sequence in ready:
            request.note_token(self._iteration)
            if sequence.finish is not FinishReason.NOT_FINISHED and sequence.cache is not None:
                self._store(request, sequence)
                sequence.cache = None

    def _chunk(self, work: Work) -> Chunk:
        cache, adapter = work.sequence.cache, work.request.adapter
        assert cache is not None
        cache.reserve(cache.length + len(work.tokens))
        wants_all = work.in_prompt and work.request.output.return_context_logits
        return Chunk(
            cache,
            work.tokens,
            len(work.tokens) if wants_all else int(work.last),
            None if adapter is None else adapter.adapter,
            work.request.prompt_table,
        )

    def _after_prompt(self, work: Work, logits: NDArray[np.float32]) -> None:
        request, cache = work.request, work.sequence.cache
        assert cache is not None
        if request.output.return_context_logits:
            if request.context_logits is None:
                shape = (len(request.prompt), self._config.vocab_size)
                request.context_logits = np.zeros(shape, np.float32)
            request.context_logits[cache.length - len(work.tokens) : cache.length] = logits
        if work.last:
            self._store(request, work.sequence)

    def _split(self, work: Work) -> list[tuple[ActiveRequest, Sequence]]:
        """Return the sequences whose next tokens are chosen from the logits of ``work``.

        The prompt of a request is processed once, in the KV cache of the first sample. When the
        prompt is complete, the other samples get copies of this cache.
        """
        request, first = work.request, work.sequence
        if not work.in_prompt or request.beams is not None:
            return [(request, first)]
        assert first.cache is not None
        for sequence in request.sequences[1:]:
            sequence.cache = first.cache.fork()
        return [(request, sequence) for sequence in request.sequences]

    def _store(self, request: ActiveRequest, sequence: Sequence) -> None:
        assert sequence.cache is not None
        self._pool.store(
            sequence.cache,
            request.prompt + sequence.tokens,
            request.reuse_key,
            len(request.prompt),
            request.request.kv_cache_retention_config,
        )

"""The synthetic engine, which returns scripted tokens at a given rate, for load tests.

The executor uses this engine for folders whose ``pretrained_config.architecture`` is
``SyntheticForCausalLM``. The settings are in ``config.json`` under ``synthetic``. Thousands of
requests need little CPU time, because there is no model. Queue, limits, streaming, stop words,
cancellation, LoRA cache and statistics are the same as with a model.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from triton_repo.cpu_executor import active
from triton_repo.cpu_executor.admission import AdmissionLimits, refuse
from triton_repo.cpu_executor.decoder import accept
from triton_repo.cpu_executor.engine import SYNTHETIC, CpuEngineConfig
from triton_repo.cpu_executor.enums import FinishReason
from triton_repo.cpu_executor.executor_config import ExecutorConfig
from triton_repo.cpu_executor.loop import IterationProgress, RequestLoop
from triton_repo.cpu_executor.lora import LoraCache
from triton_repo.cpu_executor.mailbox import Mailbox, Queued
from triton_repo.cpu_executor.sequence import Sequence
from triton_repo.cpu_executor.stats import KvCacheStats
from triton_repo.cpu_executor.words import StopWords

# Shortest time between two steps, in seconds. A response contains all tokens that are due.
TICK_SECONDS = 0.005


@dataclass(frozen=True)
class SyntheticPace:
    """The token ids that every sequence generates, and the times at which they are due.

    Each sequence repeats the ids in ``tokens`` until it reaches its length limit or the request's
    ``end_id``. If ``tokens`` is empty, a sequence counts up from the last prompt id and skips
    ``end_id``. ``first_token_ms`` is the time from a sequence's start to its first token.
    """

    tokens_per_second: float = 50.0
    first_token_ms: float = 50.0
    tokens: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.tokens_per_second <= 0:
            raise ValueError(f"tokens_per_second: found {self.tokens_per_second}, allowed > 0")
        if self.first_token_ms < 0:
            raise ValueError(f"first_token_ms: found {self.first_token_ms}, allowed >= 0")

    def due(self, seconds: float) -> int:
        """Return the number of tokens that are due ``seconds`` after the start of a sequence."""
        late = seconds - self.first_token_ms / 1000
        return 0 if late < 0 else 1 + int(late * self.tokens_per_second)

    def time_of(self, count: int) -> float:
        """Return the seconds from a sequence's start to its token ``count``, counted from 0."""
        return self.first_token_ms / 1000 + count / self.tokens_per_second


def pace_from(settings: dict[str, Any]) -> SyntheticPace:
    """Parse the value of ``synthetic`` in ``config.json``.

    Raises ValueError for an unknown setting or a wrong value.
    """
    unknown = sorted(set(settings) - set(SyntheticPace.__dataclass_fields__))
    if unknown:
        raise ValueError(
            f"synthetic: found {unknown}, allowed {list(SyntheticPace.__dataclass_fields__)}"
        )
    return SyntheticPace(**{**settings, "tokens": tuple(settings.get("tokens", ()))})


def build(
    engine_dir: str | Path,
    *,
    vocab_size: int,
    tokens_per_second: float = 50.0,
    first_token_ms: float = 50.0,
    tokens: Seq[int] = (),
    max_batch_size: int = 4096,
    max_seq_len: int = 8192,
) -> Path:
    """Write an engine folder for the synthetic engine, and return its path."""
    target = Path(engine_dir)
    target.mkdir(parents=True, exist_ok=True)
    config = {
        "version": "0.17.0",
        "pretrained_config": {
            "architecture": SYNTHETIC,
            "dtype": "float16",
            "logits_dtype": "float32",
            "vocab_size": vocab_size,
            "max_position_embeddings": max_seq_len,
        },
        "build_config": {
            "max_batch_size": max_batch_size,
            "max_input_len": max_seq_len,
            "max_seq_len": max_seq_len,
            "max_beam_width": 1,
        },
        "synthetic": asdict(SyntheticPace(tokens_per_second, first_token_ms, tuple(tokens))),
    }
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return target


class SyntheticLoop(RequestLoop):
    """Loop that appends each request's scripted tokens at the times when they are due."""

    def __init__(self, config: CpuEngineConfig, settings: ExecutorConfig, mailbox: Mailbox) -> None:
        self._pace = pace_from(config.synthetic)
        size = config.tokens_per_block
        max_batch_size = settings.max_batch_size or config.max_batch_size
        limits = AdmissionLimits(
            max_input_len=config.max_input_len,
            max_seq_len=config.max_seq_len,
            max_beam_width=1,
            max_batch_size=max_batch_size,
            max_blocks=max_batch_size * -(-config.max_seq_len // size),
            tokens_per_block=size,
        )
        lora = None
        if config.lora_target_modules:
            lora = LoraCache(config, None, settings.peft_cache_config)
        super().__init__(config, settings, mailbox, limits=limits, lora=lora, guides=None)
        self._next = 0.0

    def _activate(self, entry: Queued) -> active.ActiveRequest:
        if entry.request.guided_decoding_params is not None:
            raise refuse("guided decoding is not supported by the synthetic engine")
        request = super()._activate(entry)
        request.stop_words = StopWords(entry.request.stop_words or ())
        request.schedule()
        assert request.first_scheduled is not None
        self._next = min(self._next, request.first_scheduled + self._pace.time_of(0))
        return request

    def _advance(self) -> IterationProgress | None:
        now = time.monotonic()
        if now < self._next:
            return None
        emitted = 0
        starting = 0
        waking = []
        for request in self._active:
            if request.is_done or not request.is_ready:
                continue
            assert request.first_scheduled is not None
            due = self._pace.due(now - request.first_scheduled)
            before = emitted
            for sequence in request.list_unfinished():
                starting += not sequence.tokens
                emitted += self._emit(request, sequence, due)
            if emitted > before:
                request.note_token(self._iteration)
            waking.append(request.first_scheduled + self._pace.time_of(due))
        self._next = max(min(waking, default=now), now + TICK_SECONDS)
        return IterationProgress(
            scheduled=len(waking),
            context_requests=starting,
            generation_requests=len(waking) - starting,
            generation_tokens=emitted,
        )

    def _emit(self, request: active.ActiveRequest, sequence: Sequence, due: int) -> int:
        count = 0
        while len(sequence.tokens) < due and sequence.finish is FinishReason.NOT_FINISHED:
            accept(request, sequence, self._token(request, sequence), 0.0)
            count += 1
        return count

    def _token(self, request: active.ActiveRequest, sequence: Sequence) -> int:
        position = len(sequence.tokens)
        if self._pace.tokens:
            return self._pace.tokens[position % len(self._pace.tokens)]
        vocab = self._config.vocab_size
        if not 0 <= request.end_id < vocab:
            return (request.prompt[-1] + 1 + position) % vocab
        # Skip end_id: count in the cycle of the ids end_id + 1, ..., end_id - 1 (modulo ``vocab``).
        first = request.end_id + 1
        step = ((request.prompt[-1] - first) % vocab + 1 + position) % (vocab - 1)
        return (first + step) % vocab

    def _pause(self) -> None:
        time.sleep(max(0.0, min(TICK_SECONDS, self._next - time.monotonic())))

    def _kv_cache_stats(self) -> KvCacheStats:
        size = self._limits.tokens_per_block
        used = sum(
            -(-(len(r.prompt) + len(s.tokens)) // size)
            for r in self._active
            for s in r.list_unfinished()
        )
        return KvCacheStats(
            max_num_blocks=self._limits.max_blocks,
            free_num_blocks=self._limits.max_blocks - used,
            used_num_blocks=used,
            tokens_per_block=size,
        )

    def _memory(self) -> int:
        return 0

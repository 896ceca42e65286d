"""Measure tokens per second: ``python -m triton_repo.cpu_executor.throughput ENGINE``.

For each number of concurrent streamed requests, the command prints tokens per second of wall time
and of CPU time (of all threads), the time to the first response, and the median duration of an
iteration while all requests generate.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from triton_repo.cpu_executor import bindings as trtllm
from triton_repo.cpu_executor.engine import load_config


@dataclass(frozen=True)
class Measurement:
    concurrency: int
    tokens_per_second: float
    tokens_per_cpu_second: float
    first_response_ms: float
    iteration_ms: float


def measure(
    executor: trtllm.Executor,
    concurrency: int,
    *,
    vocab_size: int,
    prompt_tokens: int = 64,
    max_tokens: int = 128,
    sampling: trtllm.SamplingConfig | None = None,
) -> Measurement:
    """Run ``concurrency`` requests at once, and measure their throughput and latency.

    The prompts are random. The requests have no ``end_id``, so each one generates exactly
    ``max_tokens`` tokens.
    """
    random = np.random.default_rng(concurrency)
    requests = [
        trtllm.Request(
            random.integers(0, vocab_size, prompt_tokens),
            max_tokens,
            streaming=True,
            sampling_config=sampling,
        )
        for _ in range(concurrency)
    ]
    executor.get_latest_iteration_stats()
    cpu, start = time.process_time(), time.monotonic()
    left = set(executor.enqueue_requests(requests))
    first = 0.0
    tokens = 0
    while left:
        for response in executor.await_responses():
            first = first or time.monotonic() - start
            tokens += len(response.result.output_token_ids[0])
            if response.result.is_final:
                left.discard(response.request_id)
    wall, spent = time.monotonic() - start, time.process_time() - cpu
    full = [
        stats.iter_latency_ms
        for stats in executor.get_latest_iteration_stats()
        if stats.inflight_batching_stats is not None
        and stats.inflight_batching_stats.num_gen_requests == concurrency
    ]
    return Measurement(
        concurrency,
        tokens / wall,
        tokens / spent,
        first * 1000,
        statistics.median(full) if full else float("nan"),
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine_dir", type=Path)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--top-p", type=float, help="sample instead of greedy decoding")
    options = parser.parse_args(arguments)
    vocab_size = load_config(options.engine_dir).vocab_size
    settings = trtllm.ExecutorConfig()
    print("requests  tokens/s  tokens/CPU s  first ms  iteration ms")
    with trtllm.Executor(options.engine_dir, trtllm.ModelType.DECODER_ONLY, settings) as executor:
        for concurrency in options.concurrency:
            sampling = trtllm.SamplingConfig(top_p=options.top_p)
            row = measure(executor, concurrency, vocab_size=vocab_size, sampling=sampling)
            print(
                f"{row.concurrency:8} {row.tokens_per_second:9.0f} "
                f"{row.tokens_per_cpu_second:13.0f} {row.first_response_ms:9.1f} "
                f"{row.iteration_ms:13.2f}"
            )


if __name__ == "__main__":
    main()

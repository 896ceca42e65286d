"""CPU time for choosing one of 8 replicas by the estimated contents of their KV caches.

    python -m bench.choice

The time for updating the estimates is also measured. The command prints a table with two rows for
each prompt length. In the row `known`, all replicas have cached the first half of the prompt, and
one replica has cached the complete prompt. In the row `new`, no replica has cached any part of the
prompt. The column `hashes` is the time for hashing the prompt's prefixes, which a request needs
only once for all replicas. The last line of the output is the maximum memory of the estimates for
one replica.
"""

from __future__ import annotations

import asyncio
import random
import time
import tracemalloc
from array import array
from collections.abc import Callable, Sequence

from gateway.generation.engine_request import Generation
from gateway.scheduling.balancer import choose
from gateway.scheduling.cost import affinity_key, estimate_costs
from gateway.scheduling.replica import Replica
from gateway.triton.engine import Engine
from gateway.triton.prefix_cache import PrefixCache, hash_prefixes

_REPLICAS, _TENANTS = 8, 50
_SIZES = 60, 750, 8_000
_TURNS, _TIMES = 25, 200


def _generation(size: int) -> Generation:
    ids = array("i", [random.randrange(128_000) for _ in range(size)])
    return Generation(request_id="r", prompt_ids=ids, max_tokens=1, seed=1)


def _replicas() -> list[Replica]:
    engines = [
        Engine(
            f"10.0.0.{number}:8001",
            "tensorrt_llm",
            vocab_size=128_000,
            max_seq_len=None,
            on_stop=lambda _: None,
            on_upload=lambda _: None,
        )
        for number in range(_REPLICAS)
    ]
    return [Replica(f"10.0.0.{n}:8001", engine) for n, engine in enumerate(engines)]


def _microseconds(works: Sequence[Callable[[], object]]) -> list[float]:
    """Return the CPU microseconds per call of each function: the fastest of several rounds."""
    best = [float("inf")] * len(works)
    for _ in range(_TURNS):
        for number, work in enumerate(works):
            began = time.process_time()
            for _ in range(_TIMES):
                work()
            best[number] = min(best[number], 1e6 * (time.process_time() - began) / _TIMES)
    return best


def _costs(size: int, *, known: bool) -> list[float]:
    """Return the CPU microseconds of three steps of a request.

    The steps are hashing the prompt's prefixes, choosing a replica, and updating the estimate of
    the chosen replica's cache.
    """
    replicas, generation = _replicas(), _generation(size)
    prefixes = hash_prefixes(generation, "tenant")
    if known:
        half = _generation(size)
        half.prompt_ids[: size // 2] = generation.prompt_ids[: size // 2]
        for replica in replicas:
            replica.engine.prefixes.record_sent(hash_prefixes(half, "tenant"))
        replicas[3].engine.prefixes.record_sent(prefixes)

    def pick() -> None:
        key = affinity_key(generation, prefixes)
        choose(replicas, key, estimate_costs(replicas, generation, prefixes))

    def learn() -> None:
        cache = replicas[3].engine.prefixes
        expected = cache.record_sent(prefixes)
        cache.record_answer(prefixes, expected, int(expected.tokens))
        if not known:
            cache.forget()

    works = (lambda: hash_prefixes(generation, "tenant"), pick, learn)
    return _microseconds(works)


def _max_bytes() -> int:
    """Return the peak size in bytes of the estimate of one replica's cache, with many tenants."""
    prompts = [hash_prefixes(_generation(750)) for _ in range(5_000)]
    for number, prefixes in enumerate(prompts):
        prefixes.tenant = f"tenant {number % _TENANTS}"
    hashes = sum([len(prefixes.hashes) for prefixes in prompts])
    tracemalloc.start()
    cache, most = PrefixCache(), 0
    for prefixes in prompts:
        # Create new int objects while tracemalloc is running, so that the hashes that the
        # PrefixCache retains are included in the measured memory.
        prefixes.hashes = [int(str(value)) for value in prefixes.hashes]
        cache.record_answer(prefixes, cache.record_sent(prefixes), None)
        prefixes.hashes = []
        most = max(most, tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()
    assert len(cache) < hashes
    return most


async def main() -> None:
    print("| prompt | hashes us | choice us | learning us | all us |")
    print("| --- | ---: | ---: | ---: | ---: |")
    for size in _SIZES:
        for known in (True, False):
            found = _costs(size, known=known)
            cells = [f"{cost:.1f}" for cost in (*found, sum(found))]
            print(f"| {size:,} tokens, {'known' if known else 'new'} | {' | '.join(cells)} |")
    print(f"\nkept of a replica: {_max_bytes() / 2**20:.1f} MiB at the most")


if __name__ == "__main__":
    asyncio.run(main())

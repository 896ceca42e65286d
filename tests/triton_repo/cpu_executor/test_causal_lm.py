"""Forward pass: logits equal transformers', and batching does not change them."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.executor_client import GOLDEN, golden, golden_greedy, golden_prompt
from triton_repo.cpu_executor.causal_lm import CausalLM, Chunk
from triton_repo.cpu_executor.engine import CpuEngineConfig, load_config
from triton_repo.cpu_executor.gpt import Gpt
from triton_repo.cpu_executor.kv_cache import SequenceCache
from triton_repo.cpu_executor.linear import Linear
from triton_repo.cpu_executor.llama import Llama

CASES = ("gqa", "tied_bias", "llama3_rope", "bfloat16", "gpt2")


def load(case: str) -> tuple[CpuEngineConfig, CausalLM]:
    config = load_config(GOLDEN / case)
    kind = Gpt if case == "gpt2" else Llama
    return config, kind(config, GOLDEN / case)


@pytest.mark.parametrize("case", CASES)
def test_prompt_logits_equal_transformers(case: str) -> None:
    config, model = load(case)
    prompt = golden_prompt(case)
    logits = model.forward([Chunk(SequenceCache(config, len(prompt)), prompt, len(prompt))])
    expected = golden(case)["logits"]
    difference = np.abs(logits[::10] - expected).max() / np.abs(expected).max()
    assert difference < 1e-5


@pytest.mark.parametrize("case", CASES)
def test_greedy_output_equals_transformers(case: str) -> None:
    config, model = load(case)
    prompt = golden_prompt(case)
    cache = SequenceCache(config, 1)
    cache.reserve(len(prompt))
    tokens = [int(model.forward([Chunk(cache, prompt)])[-1].argmax())]
    expected = golden_greedy(case)
    while len(tokens) < len(expected):
        cache.reserve(cache.length + 1)
        tokens.append(int(model.forward([Chunk(cache, tokens[-1:])])[-1].argmax()))
    assert tokens == expected


@pytest.mark.parametrize("case", CASES)
def test_a_prompt_in_pieces_gives_the_same_bits(case: str) -> None:
    config, model = load(case)
    prompt = golden_prompt(case)
    whole = model.forward([Chunk(SequenceCache(config, len(prompt)), prompt, len(prompt))])
    cache = SequenceCache(config, len(prompt))
    pieces = [
        model.forward([Chunk(cache, piece, len(piece))])
        for piece in (prompt[:64], prompt[64:128], prompt[128:])
    ]
    assert np.array_equal(np.concatenate(pieces), whole)


@pytest.mark.parametrize("case", ["gqa", "gpt2"])
def test_a_sequence_does_not_depend_on_its_batch(case: str) -> None:
    config, model = load(case)
    prompts = [golden_prompt()[i : i + 5 + 7 * i] for i in range(11)]

    def steps(group: list[list[int]]) -> list[np.ndarray]:
        caches = [SequenceCache(config, 200) for _ in group]
        rows = [model.forward([Chunk(c, p)]) for c, p in zip(caches, group, strict=True)]
        last = [int(row.argmax()) for row in rows]
        seen = []
        for _ in range(6):
            # Another sequence's prompt runs in the same batch, as in in-flight batching.
            other = Chunk(SequenceCache(config, 60), golden_prompt()[:60], 1)
            chunks = [Chunk(c, [t]) for c, t in zip(caches, last, strict=True)]
            logits = model.forward([*chunks, other])[: len(group)]
            last = [int(t) for t in logits.argmax(axis=1)]
            seen.append(logits)
        return list(np.stack(seen, axis=1))

    together = steps(prompts)
    for prompt, logits in zip(prompts, together, strict=True):
        (alone,) = steps([prompt])
        assert np.array_equal(alone, logits)


@pytest.mark.parametrize("size", [(64, 96), (256, 160), (768, 64), (1024, 70)])
def test_linear_rows_do_not_depend_on_the_row_count(size: tuple[int, int]) -> None:
    random = np.random.default_rng(0)
    in_size, out_size = size
    weight = random.standard_normal((out_size, in_size), dtype=np.float32)
    linear = Linear(weight, np.ones(out_size, np.float32))
    x = random.standard_normal((40, in_size), dtype=np.float32)
    whole = linear(x)
    np.testing.assert_allclose(whole, x @ weight.T + 1, rtol=1e-3, atol=1e-3)
    for count in range(1, 40):
        assert np.array_equal(linear(x[:count]), whole[:count])

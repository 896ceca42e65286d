"""LoRA in the executor: tensor layout, mixed batches, cache and error messages."""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from tests.support.executor_client import (
    GOLDEN,
    golden_prompt,
    request,
    run,
    start_golden,
)
from triton_repo.cpu_executor import bindings as trtllm
from triton_repo.cpu_executor.engine import LLAMA_LORA_MODULES, build, load_config
from triton_repo.cpu_executor.llama import Llama
from triton_repo.cpu_executor.lora import (
    MODULE_NAMES,
    LoraCache,
    LoraError,
    element_count,
    module_sizes,
)

PROMPT = golden_prompt()[:40]
# Module id -> weight in the checkpoint. gate_proj is mlp_h_to_4h, and up_proj is mlp_gate.
WEIGHTS = {
    1: "self_attn.q_proj",
    2: "self_attn.k_proj",
    3: "self_attn.v_proj",
    4: "self_attn.o_proj",
    5: "mlp.gate_proj",
    6: "mlp.down_proj",
    7: "mlp.up_proj",
}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(
        GOLDEN / "gqa",
        tmp_path_factory.mktemp("lora"),
        lora_target_modules=LLAMA_LORA_MODULES,
        max_lora_rank=8,
        gather_context_logits=True,
    )


@pytest.fixture(scope="module")
def executor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[trtllm.Executor]:
    with start_golden(tmp_path_factory.mktemp("lora")) as executor:
        yield executor


Factors = dict[tuple[int, int], tuple[np.ndarray, np.ndarray]]


def factors(engine: Path, seed: int, modules: dict[int, int], scale: float = 0.3) -> Factors:
    """Return random A ``[rank, in]`` and B ``[out, rank]`` for each module and layer."""
    config = load_config(engine)
    random = np.random.default_rng(seed)
    made = {}
    for layer in range(config.num_hidden_layers):
        for module, rank in modules.items():
            size_in, size_out = module_sizes(config, module)
            a = (random.standard_normal((rank, size_in)) * scale).astype(np.float16)
            b = (random.standard_normal((size_out, rank)) * scale).astype(np.float16)
            made[layer, module] = (a, b)
    return made


def tensors(parts: Factors) -> tuple[np.ndarray, np.ndarray]:
    lines = [np.concatenate([a.reshape(-1), b.reshape(-1)]) for a, b in parts.values()]
    weights = np.zeros((len(lines), max(map(len, lines))), np.float16)
    for row, line in zip(weights, lines, strict=True):
        row[: len(line)] = line
    rows = [[module, layer, len(parts[layer, module][0])] for layer, module in parts]
    return weights, np.array(rows, np.int32)


def lora(task_id: int, parts: Factors | None = None) -> trtllm.LoraConfig:
    return trtllm.LoraConfig(task_id, *(() if parts is None else tensors(parts)))


def merged(parts: Factors, folder: Path) -> Path:
    """Write the golden checkpoint with the adapter merged into its weights."""
    loaded = load_file(GOLDEN / "gqa" / "model.safetensors")
    for (layer, module), (a, b) in parts.items():
        name = f"model.layers.{layer}.{WEIGHTS[module]}.weight"
        loaded[name] = loaded[name] + b.astype(np.float32) @ a.astype(np.float32)
    folder.mkdir()
    save_file(loaded, folder / "model.safetensors")
    (folder / "config.json").write_text((GOLDEN / "gqa" / "config.json").read_text())
    return folder


@pytest.mark.parametrize(
    "modules", [{1: 4, 3: 2}, {2: 8}, {4: 1}, {5: 3}, {6: 8, 7: 2}, dict.fromkeys(range(1, 8), 8)]
)
def test_adapter_equals_merged_weights(
    executor: trtllm.Executor, engine: Path, tmp_path: Path, modules: dict[int, int]
) -> None:
    parts = factors(engine, sum(modules), modules)
    task_id = 1000 + hash(tuple(modules.items())) % 10**6
    asked = request(PROMPT, 12, lora_config=lora(task_id, parts), return_context_logits=True)
    (output,) = run(executor, asked)
    plain = build(merged(parts, tmp_path / "hf"), tmp_path / "plain", gather_context_logits=True)
    settings = trtllm.ExecutorConfig()
    with trtllm.Executor(plain, trtllm.ModelType.DECODER_ONLY, settings) as other:
        (expected,) = run(other, request(PROMPT, 12, return_context_logits=True))
    assert output.last.context_logits is not None
    np.testing.assert_allclose(
        output.last.context_logits, expected.last.context_logits, rtol=1e-3, atol=1e-3
    )
    assert output.tokens() == expected.tokens()
    assert output.tokens() != run(executor, request(PROMPT, 12))[0].tokens()


def test_mixed_batch_equals_each_alone(executor: trtllm.Executor, engine: Path) -> None:
    adapters = [None, *(factors(engine, seed, {1: 4, 5: 2, 6: 8}) for seed in (1, 2, 3))]
    for task_id, parts in enumerate(adapters):
        if parts is not None:
            run(executor, request(PROMPT, 1, lora_config=lora(task_id, parts)))

    def requests() -> list[trtllm.Request]:
        return [
            request(PROMPT[i:], 15, lora_config=lora(i % 4) if i % 4 else None) for i in range(12)
        ]

    together = [output.tokens() for output in run(executor, *requests())]
    alone = [run(executor, one)[0].tokens() for one in requests()]
    assert together == alone
    assert len({tuple(tokens) for tokens in together}) == 12


def test_reused_blocks_belong_to_their_adapter(executor: trtllm.Executor, engine: Path) -> None:
    run(executor, request(PROMPT, 1, lora_config=lora(50, factors(engine, 50, {2: 8}))))
    asked = [request(PROMPT, 3, lora_config=c, return_perf_metrics=True) for c in (lora(50), None)]
    outputs = [run(executor, one)[0] for one in asked]
    hits = [o.last.request_perf_metrics.kv_cache_metrics.num_reused_blocks for o in outputs]
    assert hits[0] == 2
    assert outputs[0].tokens() != outputs[1].tokens()


def test_cached_id_needs_no_weights_and_ignores_new_ones(
    executor: trtllm.Executor, engine: Path
) -> None:
    first = factors(engine, 60, {1: 4, 6: 4})
    (output,) = run(executor, request(PROMPT, 10, lora_config=lora(60, first)))
    other = factors(engine, 61, {1: 4, 6: 4})
    for config in (lora(60), lora(60, other)):
        assert run(executor, request(PROMPT, 10, lora_config=config))[0].tokens() == output.tokens()


def test_unknown_id_gets_the_bare_text(executor: trtllm.Executor) -> None:
    (output,) = run(executor, request(PROMPT, 2, lora_config=lora(404)))
    assert output.error == (
        "LoRA task 404 not found in cache. Please send LoRA weights with request"
    )


def broken(
    engine: Path, row: list[int] | None = None, **changes: Any
) -> tuple[np.ndarray, np.ndarray]:
    weights, rows = tensors(factors(engine, 0, {1: 2}))
    if row is not None:
        rows = np.array([row, *rows.tolist()[1:]], np.int32)
    return changes.get("weights", lambda w: w)(weights), changes.get("rows", lambda r: r)(rows)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"weights": lambda w: w.astype(np.float32)},
            "Expected lora weights to be the same data type as base model",
        ),
        (
            {"rows": lambda r: r.astype(np.int64)},
            "Expected lora config tensor to have type kINT32",
        ),
        ({"rows": lambda r: r[:, :2]}, "Expected dim2 of lora_keys to have a size in [3, 4]"),
        ({"row": [1, 2, 2]}, "Expected layerId to be in the range [0, numModelLayers)"),
        ({"row": [1, -1, 2]}, "Expected layerId to be in the range [0, numModelLayers)"),
        ({"row": [1, 0, 0]}, "Expected adapterSize to be > 0"),
        ({"row": [0, 0, 2]}, "lora module 0 not enabled for this model"),
        ({"row": [1, 0, 9]}, "Invalid low_rank (9). low_rank must be smaller than mMaxLowRank (8)"),
        ({"row": [1, 0, 8]}, "lora_weights has to few values for attn_q"),
        (
            {"rows": lambda r: np.pad(r, ((0, 0), (0, 1)), constant_values=1)},
            "DoRA is not supported",
        ),
    ],
)
def test_broken_tensors_are_refused_at_fetch(
    executor: trtllm.Executor, engine: Path, changes: dict[str, Any], text: str
) -> None:
    config = trtllm.LoraConfig(70, *broken(engine, **changes))
    (output,) = run(executor, request(PROMPT, 2, lora_config=config))
    assert output.error is not None
    assert output.error.startswith("Encountered an error when fetching new request: ")
    assert text in output.error
    (again,) = run(executor, request(PROMPT, 2, lora_config=lora(70)))
    assert "not found in cache" in str(again.error)


def test_four_columns_without_dora_are_fine(executor: trtllm.Executor, engine: Path) -> None:
    weights, rows = tensors(factors(engine, 9, {1: 2}))
    config = trtllm.LoraConfig(71, weights, np.pad(rows, ((0, 0), (0, 1))))
    assert run(executor, request(PROMPT, 2, lora_config=config))[0].error is None


def test_module_that_the_engine_lacks_is_refused(tmp_path: Path, engine: Path) -> None:
    with start_golden(tmp_path, limits={"lora_target_modules": ["attn_q"]}) as executor:
        good, bad = (
            request(PROMPT, 2, lora_config=lora(i, factors(engine, 0, {i: 2}))) for i in (1, 7)
        )
        outputs = run(executor, good, bad)
    assert outputs[0].error is None
    assert "lora module mlp_gate not enabled for this model" in str(outputs[1].error)


def test_an_engine_without_lora_refuses_adapters(tmp_path: Path, engine: Path) -> None:
    with start_golden(tmp_path, limits={"lora_target_modules": []}) as executor:
        config = lora(1, factors(engine, 0, {1: 2}))
        (output,) = run(executor, request(PROMPT, 2, lora_config=config))
    assert "the engine was built without LoRA" in str(output.error)


def test_bfloat16_weights_come_as_bits(tmp_path: Path, engine: Path) -> None:
    parts = factors(engine, 80, {1: 4, 6: 2})
    exact = {
        key: tuple((m.astype(np.float32).view(np.uint32) & 0xFFFF0000).view(np.float32) for m in ab)
        for key, ab in parts.items()
    }
    weights, rows = tensors(parts)
    line = [np.concatenate([m.reshape(-1) for m in ab]) for ab in exact.values()]
    bits = np.zeros(weights.shape, np.uint16)
    for row, values in zip(bits, line, strict=True):
        row[: len(values)] = (values.view(np.uint32) >> 16).astype(np.uint16)
    plain = build(merged(exact, tmp_path / "hf"), tmp_path / "plain")
    settings = trtllm.ExecutorConfig()
    with trtllm.Executor(plain, trtllm.ModelType.DECODER_ONLY, settings) as other:
        (expected,) = run(other, request(PROMPT, 12))
    with start_golden(tmp_path, limits={"dtype": "bfloat16"}) as executor:
        for task_id, raw in ((1, bits), (2, bits.view("V2"))):
            config = trtllm.LoraConfig(task_id, raw, rows)
            (output,) = run(executor, request(PROMPT, 12, lora_config=config))
            assert output.tokens() == expected.tokens()


def cache_for(adapters: float, engine: Path) -> trtllm.PeftCacheConfig:
    """Return a cache configuration for this many adapters of the largest size."""
    config = load_config(engine)
    largest = sum(2 * 2 * element_count(config, module, 8) for module in MODULE_NAMES)
    return trtllm.PeftCacheConfig(host_cache_size=int(adapters * largest))


def test_idle_adapters_are_evicted_and_running_ones_never(tmp_path: Path, engine: Path) -> None:
    whole = dict.fromkeys(range(1, 8), 8)
    # 400 steps of 20 ms: both long requests run on while a third is refused.
    settings = {"peft_cache_config": cache_for(2.5, engine), "least_iteration_ms": 20}
    with start_golden(tmp_path, **settings) as executor:

        def ask(task_id: int, *, weights: bool, tokens: int = 2) -> trtllm.Request:
            parts = factors(engine, task_id, whole) if weights else None
            return request(PROMPT, tokens, lora_config=lora(task_id, parts))

        for task_id in (1, 2):
            assert run(executor, ask(task_id, weights=True))[0].error is None
        assert run(executor, ask(1, weights=False))[0].error is None
        assert run(executor, ask(3, weights=True))[0].error is None
        (evicted,) = run(executor, ask(2, weights=False))
        assert "LoRA task 2 not found in cache" in str(evicted.error)

        long = [ask(i, weights=False, tokens=400) for i in (1, 3)]
        ids = executor.enqueue_requests(long)
        while executor.get_num_responses_ready(ids[1]) == 0:
            executor.await_responses(ids[0], 1.0)
        full = executor.enqueue_request(ask(4, weights=True))
        (response,) = executor.await_responses(full, 10.0)
        assert response.error_msg == "PEFT Cache is full. Could not store taskId=4"
        executor.cancel_request(ids[0])
        while not executor.await_responses(ids[0], 10.0)[-1].result.is_final:
            pass
        later = executor.enqueue_request(ask(4, weights=True))
        assert not executor.await_responses(later, 10.0)[0].has_error()
        executor.cancel_request(ids[1])


def test_a_cache_too_small_for_one_adapter_fails_at_start(tmp_path: Path, engine: Path) -> None:
    text = r"Not enough space allocated to host LoRA cache to hold 1 max sized LoRA \d+ < \d+"
    with pytest.raises(RuntimeError, match=text):
        start_golden(tmp_path, peft_cache_config=cache_for(0.9, engine))


def test_failed_preparation_names_the_task(
    tmp_path: Path, engine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken_fold(*_: object) -> None:
        raise MemoryError("no room")

    with start_golden(tmp_path) as executor:
        monkeypatch.setattr(Llama, "fold_qkv", broken_fold)
        config = lora(5, factors(engine, 5, {1: 2}))
        outputs = run(
            executor, request(PROMPT, 2, lora_config=config), request(PROMPT, 2, lora_config=config)
        )
        assert all(
            re.search("fetching new request: Error storing task=5 in PEFT cache -- no room", str(e))
            for e in (o.error for o in outputs)
        )
        monkeypatch.undo()
        assert run(executor, request(PROMPT, 2, lora_config=config))[0].error is None


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 6), st.integers(1, 8), st.booleans()), max_size=40))
def test_the_cache_keeps_its_limit_and_evicts_the_oldest_idle(
    steps: list[tuple[int, int, bool]],
) -> None:
    config = load_config(GOLDEN / "gqa")
    names = {**vars(config), "lora_target_modules": ("attn_q",), "max_lora_rank": 8}
    config = type(config)(**names)
    unit = 2 * element_count(config, 1, 1) * config.num_hidden_layers
    limit = 16 * unit
    cache = LoraCache(config, None, trtllm.PeftCacheConfig(host_cache_size=limit))
    expected: OrderedDict[int, int] = OrderedDict()
    held: list[Any] = []
    sizes: dict[int, int] = {}
    for task_id, wanted, keep in steps:
        rank = sizes.setdefault(task_id, wanted)
        rows = np.array([[1, layer, rank] for layer in (0, 1)], np.int32)
        weights = np.zeros((2, element_count(config, 1, rank)), np.float16)
        busy = {entry.task_id for entry in held}
        asked = trtllm.LoraConfig(task_id, weights, rows)
        fits = sum(expected[t] for t in busy) + rank * unit <= limit
        if task_id not in expected and not fits:
            with pytest.raises(LoraError, match=f"PEFT Cache is full.*taskId={task_id}$"):
                cache.acquire(asked)
            continue
        entry = cache.acquire(asked)
        if task_id not in expected:
            while sum(expected.values()) + rank * unit > limit:
                victim = next(t for t in expected if t not in busy)
                del expected[victim]
            expected[task_id] = rank * unit
        expected.move_to_end(task_id)
        if keep:
            held.append(entry)
        else:
            cache.release(entry)
        if len(held) > 2:
            cache.release(held.pop(0))
        assert cache.task_ids == list(expected)
        assert cache.bytes == sum(expected.values()) <= limit
    cache.close()


def test_engine_config_names_the_modules(engine: Path) -> None:
    raw = json.loads((engine / "config.json").read_text())["build_config"]
    assert raw["plugin_config"]["lora_plugin"] == "float16"
    assert raw["lora_config"] == {
        "lora_target_modules": list(LLAMA_LORA_MODULES),
        "max_lora_rank": 8,
    }
    assert set(MODULE_NAMES.values()) == set(LLAMA_LORA_MODULES)

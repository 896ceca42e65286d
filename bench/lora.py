"""Benchmark of LoRA adapters: requests with a resident adapter, and uploads of new adapters.

`gateway up` runs the synthetic engine with the shapes of an 8B Llama model, and adapters of about
13 and 132 MB. Requests to an adapter in the engine's cache are compared with requests to the base
model. The first request to an adapter, which uploads its weights, is compared with a request that
tritonclient sends with the same tensors. The longest stall of the gateway's event loop during an
upload is also measured.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import numpy.typing as npt
import psutil
import tritonclient.grpc.aio as triton

from adapters.adapter import MODULE_IDS
from bench.machine import pin_family
from bench.servers import MODEL, Bench, Unmeasured, environment
from ops.local_stack.state import ADMIN_KEY_FILE, StackState

HIDDEN, INNER, KV, LAYERS = 4096, 14336, 1024, 32
SIZES = {
    "attn_q": HIDDEN + HIDDEN,
    "attn_k": HIDDEN + KV,
    "attn_v": HIDDEN + KV,
    "attn_dense": HIDDEN + HIDDEN,
    "mlp_h_to_4h": HIDDEN + INNER,
    "mlp_4h_to_h": INNER + HIDDEN,
    "mlp_gate": HIDDEN + INNER,
}
# Rank and target modules of the adapter of each size.
KINDS = {"13 MB": (11, ["mlp_4h_to_h"]), "132 MB": (16, list(SIZES))}
BLOCKS = 10
FULL, QUICK = {"requests": 300, "adapters": 4}, {"requests": 100, "adapters": 2}
Tensors = tuple[npt.NDArray[np.float16], npt.NDArray[np.int32]]


def make_engine(folder: Path) -> Path:
    """Write the folder of a synthetic engine that answers immediately, and return the folder.

    The engine has the demo model's tokenizer.
    """
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copyfile(MODEL / name, folder / name)
    vocab = json.loads((MODEL / "config.json").read_text())["vocab_size"]
    config = {
        "version": "0.17.0",
        "pretrained_config": {
            "architecture": "SyntheticForCausalLM",
            "dtype": "float16",
            "logits_dtype": "float32",
            "vocab_size": vocab,
            "num_hidden_layers": LAYERS,
            "hidden_size": HIDDEN,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_size": 128,
            "intermediate_size": INNER,
            "max_position_embeddings": 8192,
        },
        "build_config": {
            "max_batch_size": 256,
            "max_input_len": 8191,
            "max_seq_len": 8192,
            "max_num_tokens": 8192,
            "max_beam_width": 1,
            "kv_cache_type": "PAGED",
            "lora_config": {"lora_target_modules": list(SIZES), "max_lora_rank": 16},
            "plugin_config": {"tokens_per_block": 64, "lora_plugin": "float16"},
        },
        "synthetic": {"tokens_per_second": 1000, "first_token_ms": 0, "tokens": [300]},
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def make_tensors(kind: str, seed: int) -> Tensors:
    """Return an adapter's tensors lora_weights and lora_config.

    Their shapes are [1, rows, width] (float16) and [1, rows, 3] (int32).
    """
    rank, modules = KINDS[kind]
    rows = [(MODULE_IDS[m], layer, rank) for layer in range(LAYERS) for m in modules]
    used = [rank * SIZES[m] for _ in range(LAYERS) for m in modules]
    weights = np.zeros((1, len(rows), max(used)), np.float16)
    block = np.random.default_rng(seed).standard_normal(max(used)).astype(np.float16)
    for row, size in enumerate(used):
        weights[0, row, :size] = block[:size]
        weights[0, row, 0] = row  # make the rows, and so the adapters, differ
    return weights, np.array([rows], np.int32)


async def ask(client: httpx.AsyncClient, model: str) -> float:
    """Send a completion request for one token. Return the seconds until the response."""
    body = {"model": model, "prompt": "one two three", "max_tokens": 1, "temperature": 0}
    started = time.perf_counter()
    response = await client.post("/v1/completions", json=body)
    seconds = time.perf_counter() - started
    response.raise_for_status()
    return seconds


async def measure_resident(client: httpx.AsyncClient, pid: int, requests: int) -> dict[str, float]:
    """Measure requests to the base model and to a resident adapter, alternating.

    Return milliseconds per request, and the gateway's CPU microseconds per request.
    """
    process = psutil.Process(pid)
    seconds: dict[str, list[float]] = {"demo": [], "warm": []}
    cpu = {"demo": 0.0, "warm": 0.0}
    for model in seconds:
        await ask(client, model)
    # Read the CPU time once per block of requests. The operating system counts CPU time in steps of
    # 10 ms, and a single request needs much less.
    for block in range(BLOCKS):
        for model in sorted(seconds, reverse=bool(block % 2)):
            before = sum(process.cpu_times()[:2])
            for _ in range(requests // BLOCKS):
                seconds[model].append(await ask(client, model))
            cpu[model] += sum(process.cpu_times()[:2]) - before
    return {
        "base_ms": 1e3 * statistics.median(seconds["demo"]),
        "warm_ms": 1e3 * statistics.median(seconds["warm"]),
        "base_cpu_us": 1e6 * cpu["demo"] / requests,
        "warm_cpu_us": 1e6 * cpu["warm"] / requests,
    }


async def longest_silence(url: str, until: asyncio.Event) -> float:
    """Return the gateway's longest response time in seconds until the event `until` is set.

    The requests are for /health/live and need almost no work, so the longest response time is the
    longest stall of the gateway's event loop.
    """
    longest = 0.0
    async with httpx.AsyncClient(base_url=url) as client:
        while not until.is_set():
            started = time.perf_counter()
            await client.get("/health/live")
            longest = max(longest, time.perf_counter() - started)
            await asyncio.sleep(0.001)
    return longest


async def measure_upload(client: httpx.AsyncClient, url: str, model: str) -> tuple[float, float]:
    """Send the first request to an adapter, which uploads the adapter to Triton.

    Return the seconds until the response, and the longest stall of the gateway's event loop.
    """
    done = asyncio.Event()
    probe = asyncio.create_task(longest_silence(url, done))
    await asyncio.sleep(0.2)
    seconds = await ask(client, model)
    done.set()
    return seconds, await probe


async def measure_plain_upload(
    server: triton.InferenceServerClient, tensors: Tensors, task: int
) -> float:
    """Return the seconds until tritonclient has an answer to a request with these tensors."""
    weights, config = tensors
    values: dict[str, npt.NDArray[Any]] = {
        "input_ids": np.array([[5, 6, 7]], np.int32),
        "input_lengths": np.array([[3]], np.int32),
        "request_output_len": np.array([[1]], np.int32),
        "streaming": np.array([[True]]),
        "lora_task_id": np.array([[task]], np.uint64),
        "lora_config": config,
        "lora_weights": weights,
    }
    kinds = {"float16": "FP16", "int32": "INT32", "bool": "BOOL", "uint64": "UINT64"}
    started = time.perf_counter()
    inputs = []
    for name, value in values.items():
        inputs.append(triton.InferInput(name, value.shape, kinds[str(value.dtype)]))
        inputs[-1].set_data_from_numpy(value)

    async def requests() -> Any:
        yield {
            "model_name": "tensorrt_llm",
            "inputs": inputs,
            "outputs": [
                triton.InferRequestedOutput(name) for name in ("output_ids", "sequence_length")
            ],
            "request_id": str(task),
        }

    async for _, error in server.stream_infer(requests()):
        if error is not None:
            raise error
        break
    return time.perf_counter() - started


async def add(client: httpx.AsyncClient, name: str, tensors: Tensors, folder: Path) -> None:
    weights, config = tensors
    files = []
    for file, array in (("model.lora_weights.npy", weights), ("model.lora_config.npy", config)):
        np.save(folder / file, array)
        files.append(("file", (file, (folder / file).open("rb"))))
    response = await client.post("/v1/adapters", data={"name": name, "base": "demo"}, files=files)
    for _, (_, opened) in files:
        opened.close()
    if response.is_error:
        raise Unmeasured(response.text)


async def measure(
    state: StackState, key: str, folder: Path, *, requests: int, adapters: int
) -> dict[str, Any]:
    url = state.gateway
    headers = {"authorization": f"Bearer {key}"}
    results: dict[str, Any] = {}
    async with (
        httpx.AsyncClient(base_url=url, timeout=120, headers=headers) as client,
        triton.InferenceServerClient(state.triton_grpc) as server,
    ):
        await add(client, "warm", make_tensors("13 MB", seed=0), folder)
        results["warm"] = await measure_resident(client, state.pids["gateway"], requests)
        for kind in KINDS:
            gateway, plain, stalls = [], [], []
            for n in range(adapters):
                tensors = make_tensors(kind, seed=n + 1)
                name = f"cold-{kind.split()[0]}-{n}"
                await add(client, name, tensors, folder)
                plain.append(
                    await measure_plain_upload(server, tensors, 10**6 + len(kind) * 100 + n)
                )
                seconds, stall = await measure_upload(client, url, name)
                gateway.append(seconds)
                stalls.append(stall)
            results[kind] = {
                "bytes": int(tensors[0].nbytes),
                "gateway_ms": 1e3 * statistics.median(gateway),
                "plain_ms": 1e3 * statistics.median(plain),
                "ratio": statistics.median(gateway) / statistics.median(plain),
                "stall_ms": 1e3 * statistics.median(stalls),
            }
    return results


def rows(results: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the table's rows: the base model, a resident adapter, and an upload of each size."""
    base = results["warm"]
    empty = {"plain client ms": None, "ratio": None, "stall ms": None}
    found: list[dict[str, Any]] = [
        {"request": name, "ms": base[f"{key}_ms"], "CPU us": base[f"{key}_cpu_us"], **empty}
        for name, key in (("base model, 1 token", "base"), ("warm adapter, 1 token", "warm"))
    ]
    for kind in KINDS:
        cold = results[kind]
        found.append(
            {
                "request": f"cold adapter, {kind}",
                "ms": cold["gateway_ms"],
                "CPU us": None,
                "plain client ms": cold["plain_ms"],
                "ratio": cold["ratio"],
                "stall ms": cold["stall_ms"],
            }
        )
    return found


def lora(bench: Bench) -> list[dict[str, Any]]:
    """Start the local stack, and return the table of requests to adapters and of uploads."""
    folder = bench.folder / "lora"
    folder.mkdir()
    engine = make_engine(folder / "engine-demo")
    command = [sys.executable, "-m", "ops", "up", "--port", "0", "--model", str(engine)]
    command += ["--state-dir", str(folder / "state")]
    command += ["--parameter", f"lora_cache_host_memory_bytes={4 * 1024**3}"]
    command += ["--parameter", "lora_cache_max_adapter_size=16"]
    with (bench.folder / "up.log").open("w") as log:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment({})
        )
    try:
        assert process.stdout is not None
        if not process.stdout.readline().startswith("ready:"):
            raise Unmeasured(f"gateway up ended with code {process.wait()}")
        state = StackState.read(folder / "state")
        key = (folder / "state" / ADMIN_KEY_FILE).read_text()
        pin_family(state.pids["gateway"], bench.cores.gateway)
        pin_family(state.pids["triton"], bench.cores.upstream)
        return rows(asyncio.run(measure(state, key, folder, **(QUICK if bench.quick else FULL))))
    finally:
        process.terminate()
        process.wait()

"""The GPT repository in the real Triton: its four models, called as upstream's clients call them.

The model is a tiny GPT-2 with random weights. The expected tokens come from the CPU executor.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import shutil
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from tokenizers import Tokenizer
from tritonclient.utils import InferenceServerException

from ops.cli import main
from tests.support.executor_client import run, start
from tests.support.gpt2 import write_gpt2
from tests.support.in_process import running
from tests.support.triton_server import Arrays, Server, serving
from triton_repo.cpu_executor import bindings as trtllm
from triton_repo.cpu_executor import engine, synthetic
from triton_repo.gpt_repository import render_gpt
from triton_repo.parameters import Value

pytestmark = pytest.mark.slow

TEXT = "Born in north-east France, Soyer trained as a"
PROMPTS = [[5, 6, 7, 8, 9], [40, 41], [100, 200, 300]]
NEVER = -1
# Tokens per second, and the tokens of an answer that takes 150 s at that pace. Clients disconnect
# long before its end.
PACE, LONG = 10.0, 1500
PENDING = "nv_inference_pending_request_count"


@dataclass(frozen=True)
class Gpt:
    """A Triton that serves the repository, and the executor whose answers are expected."""

    server: Server
    model: Path
    executor: trtllm.Executor

    def expected(self, prompt: list[int], tokens: int, end_id: int | None = None) -> list[int]:
        """Return the prompt and the greedy answer as token ids."""
        request = trtllm.Request(input_token_ids=prompt, max_tokens=tokens, end_id=end_id)
        (output,) = run(self.executor, request)
        return output.tokens()


@pytest.fixture(scope="module")
def gpt(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gpt]:
    folder = tmp_path_factory.mktemp("gpt")
    model = write_gpt2(folder / "gpt2")
    engine.build(model, folder / "engine", dtype="float16", max_beam_width=3, max_batch_size=8)
    with _served(folder, model) as gpt:
        yield gpt


@pytest.fixture(scope="module")
def paced(gpt: Gpt, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gpt]:
    """Yield a Triton that generates `PACE` tokens/s for each row, on any machine."""
    folder = tmp_path_factory.mktemp("paced")
    synthetic.build(folder / "engine", vocab_size=256, tokens_per_second=PACE, first_token_ms=0)
    with _served(folder, gpt.model) as paced:
        yield paced


@contextlib.contextmanager
def _served(folder: Path, model: Path) -> Iterator[Gpt]:
    parameters: dict[str, Value] = {
        "engine_dir": str(folder / "engine"),
        "tokenizer_dir": str(model),
        "cancellation_check_period_ms": 10,
    }
    render_gpt(folder / "repository", parameters)
    with start(folder / "engine") as executor, serving(folder) as server:
        yield Gpt(server, model, executor)


def batch(prompts: list[list[int]], tokens: int, *, pad_id: int = 3, end_id: int = NEVER) -> Arrays:
    """Return the inputs of `tensorrt_llm` for a batch. Scalars of each row have shape [B, 1]."""
    longest = max(map(len, prompts))
    column = np.ones((len(prompts), 1), np.int32)
    return {
        "input_ids": np.array([p + [pad_id] * (longest - len(p)) for p in prompts], np.int32),
        "input_lengths": np.array([[len(p)] for p in prompts], np.int32),
        "request_output_len": tokens * column,
        "end_id": end_id * column,
        "pad_id": pad_id * column,
        # Upstream's clients always send these.
        "beam_width": column,
        "runtime_top_k": column,
        "runtime_top_p": np.zeros(column.shape, np.float32),
        "temperature": np.ones(column.shape, np.float32),
        "len_penalty": np.ones(column.shape, np.float32),
        "repetition_penalty": np.ones(column.shape, np.float32),
        "random_seed": np.zeros(column.shape, np.uint64),
    }


def test_the_models_declare_what_upstreams_clients_send(gpt: Gpt) -> None:
    core = gpt.server.config("tensorrt_llm")
    assert not core.model_transaction_policy.decoupled
    mandatory = {tensor.name for tensor in core.input if not tensor.optional}
    assert mandatory == {"input_ids", "input_lengths", "request_output_len", "end_id", "pad_id"}
    scalars = [tensor for tensor in core.input if tensor.name != "input_ids"]
    assert all(list(tensor.dims) == [1] and not tensor.reshape.shape for tensor in scalars)
    assert all(tensor.HasField("reshape") for tensor in scalars)
    assert [tensor.name for tensor in core.output] == ["output_ids", "log_probs"]
    optional = {tensor.name for tensor in gpt.server.config("ensemble").input if tensor.optional}
    assert {"top_k", "top_p", "length_penalty", "end_id", "pad_id", "bad_words"} <= optional


def test_rows_of_a_batch_are_what_they_are_alone(gpt: Gpt) -> None:
    reply = gpt.server.unary("tensorrt_llm", batch(PROMPTS, 6))
    expected = [gpt.expected(prompt, 6) for prompt in PROMPTS]
    width = max(map(len, expected))
    assert reply["output_ids"].tolist() == [[row + [3] * (width - len(row))] for row in expected]
    assert "log_probs" not in reply


def test_a_row_that_ends_is_padded(gpt: Gpt) -> None:
    whole = gpt.expected(PROMPTS[0], 6)
    end = whole[len(PROMPTS[0]) + 2]
    ended = gpt.expected(PROMPTS[0], 6, end)
    other = gpt.expected(PROMPTS[1], 6, end)
    ids = gpt.server.unary("tensorrt_llm", batch(PROMPTS[:2], 6, end_id=end))["output_ids"]
    assert len(ended) < len(whole)
    assert [row for [row] in ids.tolist()] == [
        row + [3] * (ids.shape[2] - len(row)) for row in (ended, other)
    ]


def test_beams_and_log_probs(gpt: Gpt) -> None:
    inputs = batch(PROMPTS[:2], 4)
    inputs["beam_width"] = inputs["beam_width"] * 3
    inputs["output_log_probs"] = np.ones((2, 1), np.bool_)
    reply = gpt.server.unary("tensorrt_llm", inputs)
    assert reply["output_ids"].shape == (2, 3, len(PROMPTS[0]) + 4)
    assert reply["log_probs"].shape == (2, 4, 3)
    assert (reply["log_probs"] < 0).all()
    first = reply["output_ids"][0]
    assert len({tuple(beam) for beam in first.tolist()}) == 3
    assert (first[:, : len(PROMPTS[0])] == PROMPTS[0]).all()


def test_what_the_executor_refuses_is_the_clients_answer(gpt: Gpt) -> None:
    inputs = batch(PROMPTS[:1], 4)
    inputs["beam_width"] = inputs["beam_width"] * 9
    with pytest.raises(InferenceServerException, match="beam"):
        gpt.server.unary("tensorrt_llm", inputs)


def test_the_ensemble_is_its_three_models(gpt: Gpt) -> None:
    """Compare the ensemble with its three models called one by one, like upstream's
    end_to_end_test.
    """
    texts = np.array([[TEXT.encode()], [b"Hello"]], np.object_)
    tokens = np.full((2, 1), 5, np.int32)
    words = np.array([[b""], [b"month, month"]], np.object_)
    asked = {"QUERY": texts, "REQUEST_OUTPUT_LEN": tokens}
    asked |= {"BAD_WORDS_DICT": words, "STOP_WORDS_DICT": words}
    before = gpt.server.unary("preprocessing", asked)
    assert before["BAD_WORDS_IDS"].shape[:2] == before["STOP_WORDS_IDS"].shape[:2] == (2, 2)
    core = {
        "input_ids": before["INPUT_ID"],
        "input_lengths": before["REQUEST_INPUT_LEN"],
        "request_output_len": before["REQUEST_OUTPUT_LEN"],
        "end_id": before["OUT_END_ID"],
        "pad_id": before["OUT_PAD_ID"],
    }
    ids = gpt.server.unary("tensorrt_llm", core)["output_ids"]
    by_hand = gpt.server.unary("postprocessing", {"TOKENS_BATCH": ids})["OUTPUT"]
    inputs = {"text_input": texts, "max_tokens": tokens, "bad_words": words, "stop_words": words}
    inputs["length_penalty"] = np.ones((2, 1), np.float32)
    whole = gpt.server.unary("ensemble", inputs)["text_output"]
    assert whole.reshape(-1).tolist() == by_hand.reshape(-1).tolist()
    tokenizer = Tokenizer.from_file(str(gpt.model / "tokenizer.json"))
    answer = gpt.expected(tokenizer.encode(TEXT).ids, 5)
    assert whole.reshape(-1)[0].decode() == tokenizer.decode(answer)


def test_a_client_that_leaves_stops_the_engine(paced: Gpt) -> None:
    """Check that an abandoned request runs for less than half of the time that it would need."""
    server, before = paced.server, seconds_of_inference(paced.server)
    with server.stream() as left:
        # Both requests are in one stream, so the second waits for the first. Once the second is
        # pending, the first is running.
        left.send(batch([PROMPTS[1]] * 8, LONG))
        left.send(batch(PROMPTS[:1], 1))
        server.wait_metric(1, PENDING, model="tensorrt_llm")
    server.unary("tensorrt_llm", batch(PROMPTS[:1], 1))
    assert seconds_of_inference(server) - before < LONG / PACE / 2


def seconds_of_inference(server: Server) -> float:
    family = "nv_inference_compute_infer_duration_us"
    return server.metric(family, model="tensorrt_llm") / 1e6


@contextlib.asynccontextmanager
async def gateway(gpt: Gpt, folder: Path, **settings: str) -> AsyncIterator[httpx.AsyncClient]:
    fields = {"tokenizer_dir": gpt.model, "max_seq_len": None} | settings
    async with running(folder, gpt.server.grpc, **fields) as (client, _, _):
        yield client


async def complete(client: httpx.AsyncClient, **body: Any) -> dict[str, Any]:
    body = {"model": "m", "prompt": TEXT, "max_tokens": 12, "temperature": 0} | body
    response = await client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


async def test_the_gateway_drives_the_core_model(gpt: Gpt, tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(gpt.model / "tokenizer.json"))
    prompt = tokenizer.encode(TEXT).ids
    whole = gpt.expected(prompt, 12)[len(prompt) :]
    async with gateway(gpt, tmp_path) as client:
        health = (await client.get("/health/ready")).json()
        assert (health["engine"]["mode"], health["engine"]["model"]) == ("token", "tensorrt_llm")
        assert "warning" not in health["engine"]
        answer = await complete(client, return_token_ids=True, ignore_eos=True)
        [choice] = answer["choices"]
        assert choice["token_ids"] == whole
        assert choice["finish_reason"] == "length"
        usage = answer["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(prompt), 12)
        # The engine has no stop words, so it continues. The tokens after the stop are neither sent
        # nor billed.
        word = tokenizer.decode([whole[4]])
        stopped = await complete(client, return_token_ids=True, ignore_eos=True, stop=word)
        [choice] = stopped["choices"]
        assert choice["text"] == choice["text"].partition(word)[0]
        assert choice["finish_reason"] == "stop"
        assert stopped["usage"]["completion_tokens"] <= 5
        drawn = {"temperature": 1, "seed": 7, "n": 3, "top_p": 0.9}
        first, second = [(await complete(client, **drawn))["choices"] for _ in range(2)]
        assert first == second
        assert len({choice["text"] for choice in first}) > 1


@pytest.mark.parametrize("first", [True, False], ids=["end id", "another"])
async def test_an_answer_ends_at_an_end_of_sequence_id(
    gpt: Gpt, tmp_path: Path, *, first: bool
) -> None:
    """Check the first end id, which the engine knows, and one that only the gateway knows."""
    tokenizer = Tokenizer.from_file(str(gpt.model / "tokenizer.json"))
    prompt = tokenizer.encode(TEXT).ids
    end = gpt.expected(prompt, 12)[len(prompt) + 2]
    ended = gpt.expected(prompt, 12, end)[len(prompt) :]
    folder = tmp_path / "tokenizer"
    shutil.copytree(gpt.model, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    if first:
        config = json.loads((folder / "tokenizer_config.json").read_text())
        config["eos_token"] = tokenizer.id_to_token(end)
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    else:
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [end]}))
    async with gateway(gpt, tmp_path, tokenizer_dir=str(folder)) as client:
        answer = await complete(client, return_token_ids=True)
    assert answer["choices"][0]["token_ids"] == (ended if first else [*ended, end])
    assert answer["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("settings", [{}, {"triton_mode": "text"}], ids=["token", "text"])
async def test_what_the_repository_lacks_is_refused_by_name(
    gpt: Gpt, tmp_path: Path, settings: dict[str, str]
) -> None:
    asked: dict[str, Any] = {
        "stream": True,
        "bad_words": ["x"],
        "logit_bias": {"7": 5},
        "logprobs": 1,
        "stop_token_ids": [9],
        "structured_outputs": {"choice": ["yes", "no"]},
        "use_beam_search": True,
    }
    served = {"frequency_penalty": 0.5, "presence_penalty": 0.5, "min_tokens": 2, "top_k": 3}
    async with gateway(gpt, tmp_path, **settings) as client:
        for name, value in (asked | served).items():
            body = {"model": "m", "prompt": "Hi", "max_tokens": 4, name: value}
            body |= {"n": 2} if name == "use_beam_search" else {}
            response = await client.post("/v1/completions", json=body)
            assert response.status_code == (400 if name in asked else 200), (name, response.text)
            if name in asked:
                assert response.json()["error"]["param"] == name


async def test_the_gateway_drives_the_ensemble(gpt: Gpt, tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(gpt.model / "tokenizer.json"))
    prompt = tokenizer.encode(TEXT).ids
    text = tokenizer.decode(gpt.expected(prompt, 12)).removeprefix(TEXT)
    async with gateway(gpt, tmp_path, triton_mode="text") as client:
        health = (await client.get("/health/ready")).json()
        assert (health["engine"]["mode"], health["engine"]["model"]) == ("text", "ensemble")
        # Triton does not pass a cancellation on to the steps of an ensemble.
        assert "cannot be stopped" in health["engine"]["warning"]
        answer = await complete(client, ignore_eos=True)
        assert answer["choices"][0]["text"] == text
        assert answer["usage"]["prompt_tokens"] == len(prompt)
        [stopped] = (await complete(client, ignore_eos=True, stop=text[3:6]))["choices"]
        assert stopped["text"] == text.partition(text[3:6])[0]


async def test_a_client_of_the_gateway_that_leaves_stops_the_engine(
    paced: Gpt, tmp_path: Path
) -> None:
    """Check that the gateway cancels its gRPC call, as the model has no stop request."""
    async with gateway(paced, tmp_path) as client:
        left, behind = await running_and_waiting(paced.server, client)
        before = seconds_of_inference(paced.server)
        left.cancel()
        await behind
        assert seconds_of_inference(paced.server) - before < LONG / PACE / 2


Answering = asyncio.Task[dict[str, Any]]


async def running_and_waiting(
    server: Server, client: httpx.AsyncClient
) -> tuple[Answering, Answering]:
    """Return the tasks of a long request and of a short one that waits behind it.

    The short request is sent again until it waits: of two concurrent requests the second may run
    first, or both run in one batch and end together.
    """
    while True:
        left = asyncio.create_task(complete(client, ignore_eos=True, max_tokens=LONG))
        while not left.done():
            behind = asyncio.create_task(complete(client, max_tokens=1))
            looks = 0
            while not behind.done() and looks < 5:
                await asyncio.sleep(0.05)
                pending = await asyncio.to_thread(server.metric, PENDING, model="tensorrt_llm")
                looks = looks + 1 if pending == 1 else 0
            if not behind.done():
                return left, behind


def test_the_reference_clients_example(gpt: Gpt, capsys: pytest.CaptureFixture[str]) -> None:
    """Check `gateway client`, whose default prompt is "Born in north-east France, Soyer trained as
    a".
    """
    tokenizer = Tokenizer.from_file(str(gpt.model / "tokenizer.json"))
    prompt = tokenizer.encode(TEXT).ids
    whole = gpt.expected(prompt, 10)
    asked = ["client", "--url", gpt.server.grpc, "--end-id", "-1", "--pad-id", "3", "-o", "10"]
    assert main([*asked, "--tokenizer-dir", str(gpt.model)]) == 0
    told = capsys.readouterr().out
    assert f"Input: {TEXT}\n" in told
    assert f"Output sequence: {whole[len(prompt) :]}\n" in told
    assert main([*asked, "--model-name", "ensemble"]) == 0
    assert f"0: {tokenizer.decode(whole)}\n" in capsys.readouterr().out
    assert main([*asked, "--tokenizer-dir", str(gpt.model), "--streaming"]) == 2
    assert "--streaming: tensorrt_llm is not decoupled" in capsys.readouterr().err


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_the_identity_test(gpt: Gpt, capsys: pytest.CaptureFixture[str], mode: str) -> None:
    asked = ["identity-test", "--url", gpt.server.grpc, "--vocab-size", "4096", "-m", mode]
    assert main([*asked, "-p", "3", "-n", "2", "-w", "-s", "6", "-beam", "2"]) == 0
    first, latency, throughput = capsys.readouterr().out.splitlines()
    assert first == "[INFO] Batch size: 8, Start len: 6, Output len: 10"
    milliseconds = float(re.fullmatch(r"\[INFO\] Latency: ([\d.]+) ms", latency)[1])
    rows = re.fullmatch(r"\[INFO\] Throughput: ([\d.]+) sentences / sec", throughput)
    assert float(rows[1]) == pytest.approx(8000 / milliseconds, rel=0.01)


def test_the_identity_test_of_what_is_no_core_model(
    gpt: Gpt, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["identity-test", "--url", gpt.server.grpc, "-p", "1", "--vocab-size", "4096"]
    assert main([*asked, "--model-name", "ensemble"]) == 2
    assert "--model-name: ensemble takes no token ids" in capsys.readouterr().err
    assert main([*asked, "-beam", "9"]) == 1
    assert "beam" in capsys.readouterr().err

"""`gateway client` and `gateway bench` against a real Triton with the llmapi repository."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ops.cli import main
from ops.commands.up import DEMO_ADAPTERS
from tests.support.in_process import running
from tests.support.llmapi_models import ENDLESS, RELEASES, render_releases
from tests.support.triton_server import MODEL, Server, serving
from triton_repo.llmapi_repository import render_llmapi

FRANCE = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
PARIS = "The capital of France is Paris."
PROMPTS = ["token-norm-dist", "--input-mean", "24", "--input-stdev", "8"]
PROMPTS += ["--output-mean", "12", "--output-stdev", "4"]


@pytest.fixture(scope="module")
def triton(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("llmapi")
    render_releases(folder / "repository", folder / "synthetic")
    render_llmapi(folder / "repository", {"model": str(MODEL), "max_lora_rank": 16})
    with serving(folder) as server:
        yield server


class Client:
    """A runner of `gateway client` in this process. `status` and `err` are the last run's."""

    def __init__(self, url: str, capsys: pytest.CaptureFixture[str]) -> None:
        self._url = url
        self._capsys = capsys

    def __call__(self, *arguments: str, model: str = "tensorrt_llm") -> str:
        self._capsys.readouterr()
        self.status = main(["client", "--url", self._url, "--model-name", model, *arguments])
        out, self.err = self._capsys.readouterr()
        return out


@pytest.fixture
def run(triton: Server, capsys: pytest.CaptureFixture[str]) -> Client:
    return Client(triton.grpc, capsys)


def test_texts_so_far_are_told_once(run: Client) -> None:
    streamed = run("--text", FRANCE, "--streaming")
    assert run.status == 0, run.err
    assert streamed == f"Got completed request\n0: {PARIS}\n"
    assert run("--text", FRANCE, "--exclude-input-in-output") == streamed
    # The model has no input for a tokenizer's end id, so the option must change nothing.
    assert run("--text", FRANCE, "-S", "--tokenizer-dir", str(MODEL)) == streamed
    shown = re.findall(r"^\[[\d.]+ ms\] '(.*)'$", run("--text", FRANCE, "-S", "-v"), re.MULTILINE)
    assert len(shown) > 1
    assert shown[-1] == PARIS


@pytest.mark.parametrize("model", RELEASES)
def test_each_releases_stream_is_the_whole_answer(run: Client, model: str) -> None:
    out = run("--text", "x", "-S", "-o", "5", "--exclude-input-in-output", model=model)
    assert out == f"Got completed request\n0: {' one' * 5}\n"
    assert run.status == 0


def test_reasons_and_statistics_are_told(run: Client) -> None:
    outputs = ("text_output", "finish_reason", "kv_cache_hit_rate", "kv_cache_missed_block")
    asked = ("--return-kv-cache-reuse-stats", "--requested-outputs", *outputs)
    out = run("--text", FRANCE, "-o", "2", *asked)
    assert run.status == 0, run.err
    assert "finish_reason: length\n" in out
    assert re.search(r"^kv_cache_hit_rate: [\d.]+$", out, re.MULTILINE)
    assert re.search(r"^kv_cache_missed_block: \d+$", out, re.MULTILINE)
    assert "arrival_time_ns" not in out
    out = run("--text", FRANCE, "--stop-words", " capital", "-S")
    assert out.endswith("\n0: The\n")


def test_adapters_by_path(run: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    zh = ("--lora-path", str(DEMO_ADAPTERS / "zh"))
    answers = [run("--text", FRANCE, "-S", *more) for more in ((), zh)]
    assert len(set(answers)) == 2
    # The engine identifies the adapter by its content, so a relative path is valid too.
    monkeypatch.chdir(DEMO_ADAPTERS)
    assert run("--text", FRANCE, "-S", "--lora-path", "zh", "--lora-name", "z") == answers[1]
    ja = run("--text", FRANCE, "-S", "--lora-path", "ja", "--lora-task-id", "7")
    assert ja not in answers
    assert run("--text", FRANCE, "-S", *zh, "--lora-task-id", "7") == ja
    out = run("--text", FRANCE, "--lora-path", "/nowhere", "--lora-task-id", "9")
    assert run.status == 1
    assert "lora_path does not exist" in out


@pytest.mark.parametrize("streaming", [["--streaming"], []])
@pytest.mark.parametrize("how", [[], ["--stop-via-request-cancel"]])
@pytest.mark.parametrize("model", RELEASES)
def test_stopping(run: Client, model: str, streaming: list[str], how: list[str]) -> None:
    long = ["--text", "x", "-o", str(ENDLESS), "--stop-after-ms", "300"]
    out = run(*long, *streaming, *how, model=model)
    assert run.status == 0, out + run.err
    assert out.count("Request is cancelled\n") == 1
    assert out.count("Got cancellation response from server\n") == (not how)
    assert "Got completed request" not in out
    # The engine has one slot.
    assert run("--text", "x", "-S", "-o", "1", model=model).endswith(" one\n")


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("--end-id", "2"), "--end-id: tensorrt_llm has no input"),
        (("-n", "2"), "--num-return-sequences: tensorrt_llm has no input"),
        (("-b", "2"), "--beam-width: tensorrt_llm has no input"),
        (("--bad-words", "x"), "--bad-words: tensorrt_llm has no input"),
        (("--repetition-penalty", "1.1"), "--repetition-penalty: tensorrt_llm has no input"),
        (("--return-log-probs",), "--return-log-probs: tensorrt_llm has no input"),
        (
            ("--guided-decoding-guide-type", "regex", "--guided-decoding-guide", "a"),
            "--guided-decoding-guide-type: tensorrt_llm has no input",
        ),
        (("--output-tokens-csv", "x", "--check-output"), "x"),
        (("--lora-task-id", "4"), "--lora-task-id: tensorrt_llm has no input"),
        (("--lora-name", "z"), "--lora-path is needed"),
        (("--lora-path", "/nowhere"), "--lora-task-id: needed"),
        (("--requested-outputs", "text_output", "output_ids"), "has no output_ids"),
        (
            ("--model-name", "like_1_2", "--lora-path", "/x"),
            "--lora-path: like_1_2 has no input",
        ),
    ],
)
def test_what_has_no_input_is_refused(run: Client, arguments: tuple[str, ...], error: str) -> None:
    run(*arguments)
    assert run.status == 2
    assert error in run.err


def bench(triton: Server, folder: Path, *arguments: str) -> list[dict[str, Any]]:
    found = folder / "all.json"
    where = ["--url", triton.grpc, "--tokenizer-dir", str(MODEL), "--json", str(found)]
    assert main(["bench", *arguments, "--warm-up", "1", *where, *PROMPTS]) == 0
    runs: list[dict[str, Any]] = json.loads(found.read_text())
    return runs


async def test_core_and_gateway_do_the_same_work(triton: Server, tmp_path: Path) -> None:
    async with running(tmp_path, triton.grpc, tokenizer_dir=MODEL, max_seq_len=512) as (http, _, _):
        load = ["--streaming", "--concurrency", "2", "--num-requests", "8"]
        more = ["core,chat", "--gateway-url", str(http.base_url), *load]
        core, chat = await asyncio.to_thread(bench, triton, tmp_path, *more)
    assert core["what"] == "tensorrt_llm of llmapi over gRPC, text"
    assert chat["what"] == "the gateway's /v1/completions over HTTP, text"
    for one, other in zip(core["samples"], chat["samples"], strict=True):
        assert not one["error"] + other["error"]
        assert one["input_tokens"] == other["input_tokens"]
        assert one["output_tokens"] == other["output_tokens"]
        times = [one[name] for name in ("began", "first", "last", "ended") if one[name] is not None]
        assert times == sorted(times)
    assert sum(sample["output_tokens"] for sample in core["samples"]) > 16
    assert len({sample["first"] for sample in core["samples"]}) > 4


@pytest.mark.parametrize("model", RELEASES)
@pytest.mark.parametrize("streaming", [["--streaming"], []])
def test_tokens_are_counted_whatever_comes_together(
    triton: Server, tmp_path: Path, model: str, streaming: list[str]
) -> None:
    load = ["core", "--tensorrt-llm-model-name", model, "--num-requests", "3", *streaming]
    [run] = bench(triton, tmp_path, *load)
    at_end = bool(streaming) and model == "like_1_2"
    assert run["what"].endswith("text, all of it at its end") == at_end
    for sample in run["samples"]:
        assert not sample["error"]
        assert 1 < sample["output_tokens"] < 40
        assert (sample["first"] is None) == (not streaming)
        if streaming:
            assert (sample["first"] == sample["last"]) == at_end


def test_without_a_tokenizer_nothing_can_be_counted(
    triton: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "core", "--url", triton.grpc, *PROMPTS]) == 2
    assert "--tokenizer-dir: needed" in capsys.readouterr().err

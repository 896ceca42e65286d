"""`gateway client` against the real stack."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest

from adapters import convert, npy, peft
from adapters.base_model import read_base_model
from gateway.tokenization.prompts import Prompts
from ops.cli import main
from tests.support.fake_triton import FakeTriton, serving
from tests.support.local_stack import Stack
from tests.support.triton_server import LONG_ANSWER, LONG_SEQ_LEN, MODEL, long_model, running
from triton_repo.cpu_executor import engine

ADAPTERS = MODEL.parent / "adapters"
FRANCE = "What is the capital of France?"
CAPITAL = "美国的首都在哪里? \n答案:"


class Client:
    """A runner of the command in this process. `status` and `out` are the last run's."""

    def __init__(self, url: str, capsys: pytest.CaptureFixture[str]) -> None:
        self._url = url
        self._capsys = capsys
        self.status = -1
        self.err = ""

    def __call__(self, *arguments: str) -> str:
        self._capsys.readouterr()
        self.status = main(["client", "--url", self._url, *arguments])
        out, self.err = self._capsys.readouterr()
        return out

    def core(self, *arguments: str) -> str:
        return self("--tokenizer-dir", str(MODEL), *arguments)


@pytest.fixture
def run(stack: Stack, capsys: pytest.CaptureFixture[str]) -> Client:
    return Client(stack.triton_grpc, capsys)


def _ids(out: str) -> list[int]:
    [line] = re.findall(r"Output sequence: \[(.*)\]", out)
    return [int(number) for number in line.split(",")] if line else []


def test_token_ids_streamed_or_not_are_the_same(run: Client) -> None:
    whole = run.core("--text", FRANCE, "--request-output-len", "8")
    assert run.status == 0, run.err
    assert whole.startswith("Got completed request\n")
    assert f"Input: {FRANCE}\n" in whole
    assert re.search(r"^Output beam 0: .*Paris", whole, re.MULTILINE)
    assert len(_ids(whole)) == 8
    assert _ids(run.core("--text", FRANCE, "-o", "8", "--streaming")) == _ids(whole)
    assert _ids(run.core("--text", FRANCE, "-o", "8", "--exclude-input-in-output")) == _ids(whole)


@pytest.mark.slow
def test_a_model_that_is_not_decoupled(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    engine.build(MODEL, tmp_path / "engine")
    ask = ["--tokenizer-dir", str(MODEL), "--text", FRANCE, "-o", "8"]
    with running(tmp_path, decoupled_mode=False) as server:
        where = ["client", "--url", server.grpc]
        assert main([*where, *ask]) == 0
        assert "Paris" in capsys.readouterr().out
        assert main([*where, *ask, "--streaming"]) == 2
        assert "--streaming: tensorrt_llm is not decoupled" in capsys.readouterr().err
        assert main([*where, "--model-name", "ensemble", "--prompt", FRANCE]) == 0
        assert "Paris" in capsys.readouterr().out


def test_each_response_is_shown_when_asked_for(run: Client) -> None:
    out = run.core("--text", FRANCE, "-o", "8", "-S", "-v")
    shown = re.findall(r"^\[[\d.]+ ms\] \[(.*)\]$", out, re.MULTILINE)
    assert len(shown) > 1
    assert [int(i) for part in shown for i in part.split(",") if i] == _ids(out)


@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm_bls"])
def test_text_models(run: Client, model: str) -> None:
    out = run("--model-name", model, "--prompt", FRANCE, "-o", "8", "-S")
    assert run.status == 0, run.err
    assert re.search(r"^0: .*Paris", out, re.MULTILINE)
    whole = run("--model-name", model, "--prompt", FRANCE, "-o", "8")
    assert f"0: {FRANCE}" in whole
    bare = run("--model-name", model, "--prompt", FRANCE, "-o", "8", "--exclude-input-in-output")
    assert FRANCE not in bare
    assert "Paris" in bare


@pytest.mark.parametrize("streaming", [["--streaming"], []])
@pytest.mark.parametrize("how", [[], ["--stop-via-request-cancel"]])
def test_stopping(
    long_stack: Stack, capsys: pytest.CaptureFixture[str], streaming: list[str], how: list[str]
) -> None:
    run = Client(long_stack.triton_grpc, capsys)
    # Without an end id only the stop ends the request, even if a process is paused a while.
    long = ["--text", "Count", "-o", str(LONG_ANSWER), "--end-id", "-1", "--stop-after-ms", "300"]
    out = run.core(*long, *streaming, *how)
    assert run.status == 0, out + run.err
    if how:
        assert "Request is cancelled\n" in out
        assert "Got completed request" not in out
    else:
        assert "Got cancellation response from server\n" in out
        assert "Got completed request\n" in out
    if streaming:
        assert len(_ids(out)) < LONG_ANSWER
    elif not how:
        assert len(_ids(out)) == 0


async def test_what_came_before_the_stop_is_shown(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Check that tokens before the stop are shown. The server sends the last one after the stop."""
    (tmp_path / "prompt.csv").write_text("1,2\n")
    servicer = FakeTriton(tokens=[5, 6, 7], fault="slow", step=2)
    servicer.forgets = 1
    async with serving(servicer) as endpoint:
        command = ["client", "--url", endpoint, "--input-tokens-csv", f"{tmp_path}/prompt.csv"]
        ended = asyncio.create_task(asyncio.to_thread(main, [*command, "-S", "--stop-after-ms=1"]))
        while not servicer.stopped:
            assert not ended.done(), await ended
            await asyncio.sleep(0.01)
        servicer.released.set()
        assert await ended == 0
    assert _ids(capsys.readouterr().out) == [5, 6, 7]


@pytest.mark.slow
def test_an_ensemble_is_stopped_through_its_core_model(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    engine.build(long_model(tmp_path), tmp_path / "engine")
    cache = {"max_tokens_in_paged_kv_cache": 2 * LONG_SEQ_LEN}
    long = ["--text", "Count", "-o", str(LONG_ANSWER), "--end-id", "-1", "--stop-after-ms", "300"]
    with running(tmp_path, **cache) as server:
        out = Client(server.grpc, capsys)("--model-name", "ensemble", *long, "-S")
    assert "Got cancellation response from server\n" in out
    assert "Got completed request\n" in out
    found = re.search(r"^0: (.*)", out, re.MULTILINE | re.DOTALL)
    assert found is not None
    prompts = Prompts.load(MODEL)
    assert len(prompts.tokenizer.encode(found[1]).ids) < LONG_ANSWER // 2
    prompts.close()


def test_lora_from_peft_and_from_npy_files(run: Client, tmp_path: Path) -> None:
    ask = ("--text", CAPITAL, "--streaming")
    assert "华盛顿" not in run.core(*ask)
    assert "华盛顿" in run.core(*ask, "--lora-path", str(ADAPTERS / "zh"))
    base = read_base_model(MODEL, ("demo",))
    npy.write(convert.convert(peft.read(ADAPTERS / "ja"), base), tmp_path)
    task = ("--lora-task-id", "77001")
    assert "ワシントン" in run.core(*ask, "--lora-path", str(tmp_path), *task)
    # The engine has stored the adapter under its task id.
    assert "ワシントン" in run.core(*ask, *task)
    assert run.status == 0
    out = run.core(*ask, "--lora-task-id", "77002")
    assert run.status == 1
    assert "Received an error from server:\n" in out
    assert "not found in cache" in out


def test_the_usual_example_as_upstreams_readme_has_it(run: Client) -> None:
    """Check options with underscores, and a backslash and an n that bash passes unchanged."""
    ask = ["-i", "grpc", "--tokenizer_dir", str(MODEL), "--tokenizer_type", "llama"]
    ask += ["--top_k", "0", "--top_p", "0.5", "--request_output_len", "10", "--streaming"]
    ask += ["--text", CAPITAL.replace("\n", r"\n"), "--lora_path", str(ADAPTERS / "zh")]
    out = run(*ask)
    assert run.status == 0, run.err
    assert run.err == (
        "gateway client: --text: \\n is sent as a newline; --verbatim sends a backslash and an n\n"
    )
    assert "华盛顿" in out
    verbatim = run(*ask, "--verbatim")
    assert run.err == ""
    assert "华盛顿" not in verbatim


def test_log_probabilities_logits_and_statistics(run: Client) -> None:
    tokens = ["--text", FRANCE, "-o", "3"]
    extra = [f"--return-{what}" for what in ("log-probs", "context-logits", "generation-logits")]
    out = run.core(*tokens, *extra, "--return-kv-cache-reuse-stats")
    assert run.status == 0, out + run.err
    prompts = Prompts.load(MODEL)
    length = len(prompts.tokenizer.encode(FRANCE).ids)
    prompts.close()
    assert f"context_logits.shape: (1, {length}, 4096)\n" in out
    assert "generation_logits.shape: (1, 1, 3, 4096)\n" in out
    assert "output_log_probs: [[[" in out
    assert "cum_log_probs: [[" in out
    assert re.search(r"^kv_cache_reused_blocks: \d+$", out, re.MULTILINE)


def test_beams_and_sequences(run: Client) -> None:
    out = run.core("--text", FRANCE, "-o", "4", "-b", "2")
    assert "Output beam 0: " in out
    assert "Output beam 1: " in out
    out = run.core("--text", FRANCE, "-o", "4", "-n", "2", "--top-k", "50", "--seed", "7")
    assert "Output sequence_index 0: " in out
    assert "Output sequence_index 1: " in out


def test_guided_decoding_and_words(run: Client) -> None:
    guide = ("--guided-decoding-guide-type", "regex", "--guided-decoding-guide", "(yes|no)")
    out = run.core("--text", FRANCE, *guide, "--streaming")
    assert re.search(r"^Output beam 0: (yes|no)$", out, re.MULTILINE)
    out = run.core("--text", "Count from 1 to 9", "-S", "--stop-words", "15", "-o", "100")
    assert re.search(r"^Output beam 0: .* 15$", out, re.MULTILINE)


def test_the_output_can_be_checked(run: Client, tmp_path: Path) -> None:
    expected = tmp_path / "expected.csv"
    ids = _ids(run.core("--text", FRANCE, "-o", "8"))
    expected.write_text(",".join(map(str, ids)))
    check = ("--text", FRANCE, "-o", "8", "--check-output", "--output-tokens-csv", str(expected))
    assert "PASS!" in run.core(*check)
    assert run.status == 0
    expected.write_text(",".join(map(str, [ids[0] + 1, *ids[1:]])))
    assert "FAIL!" in run.core(*check)
    assert run.status == 1
    assert "PASS!" in run.core(*check, "--correctness-threshold", "0.8")


def test_ids_from_a_file_need_no_tokenizer(run: Client, tmp_path: Path) -> None:
    file = tmp_path / "ids.csv"
    prompts = Prompts.load(MODEL)
    file.write_text(",".join(map(str, prompts.tokenizer.encode(FRANCE).ids)))
    prompts.close()
    out = run("--input-tokens-csv", str(file), "-o", "8", "--end-id", "2")
    assert _ids(out) == _ids(run.core("--text", FRANCE, "-o", "8"))
    assert "Output beam" not in out


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ((), "--tokenizer-dir"),
        (("--input-tokens-csv", "nowhere.csv"), "nowhere.csv"),
        (("--requested-outputs", "sequence_length"), "--requested-outputs: output_ids"),
        (("--requested-outputs", "output_ids", "finish"), "has no finish"),
        (("--model-name", "llama"), "does not serve 'llama'"),
        (("--check-output",), "--output-tokens-csv"),
        (("--model-name", "tensorrt_llm_bls", "-n", "2"), "--num-return-sequences"),
        (("--model-name", "tensorrt_llm_bls", "--stop-after-ms", "9"), "--stop-after-ms"),
        (("--url", "127.0.0.1:1"), "Triton at 127.0.0.1:1: connection refused"),
    ],
)
def test_what_cannot_be_asked_is_said(run: Client, arguments: tuple[str, ...], error: str) -> None:
    run(*arguments)
    assert run.status == 2
    assert error in run.err


def test_batches_that_are_answered_row_by_row(
    stack: Stack, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["identity-test", "--url", stack.triton_grpc, "--vocab-size", "4096", "-p", "2"]
    assert main([*asked, "-b", "3", "-s", "5"]) == 0, capsys.readouterr().err
    told = capsys.readouterr().out
    assert told.startswith("[INFO] Batch size: 3, Start len: 5, Output len: 10\n[INFO] Latency: ")

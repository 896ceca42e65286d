"""`gateway bench` against the real stack, with all three modes in one run."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from ops.cli import main
from tests.support.local_stack import Stack, Up
from tests.support.triton_server import MODEL

RANDOM = ["token-norm-dist", "--input-mean", "24", "--input-stdev", "8"]
RANDOM += ["--output-mean", "12", "--output-stdev", "4"]


def _bench(up: Up, *arguments: str) -> int:
    mode, *others = arguments
    common = ["--state-dir", str(up.state_dir), "--warm-up", "1"]
    return main(["bench", mode, *common, *others])


@pytest.fixture(scope="module")
def measured(up: Up, stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder with the files of one streaming run: all modes, two concurrency levels."""
    folder = tmp_path_factory.mktemp("bench")
    files = {"--json": "all.json", "--op-stats-csv": "stats.csv", "--requests-csv": "requests.csv"}
    files["--plot"] = "load.svg"
    where = [part for option, name in files.items() for part in (option, str(folder / name))]
    load = ["--streaming", "--concurrency", "1,4", "--num-requests", "12", "--seed", "5"]
    assert _bench(up, "all", *load, *where, *RANDOM) == 0
    return folder


def _runs(folder: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((folder / "all.json").read_text())
    return found


@pytest.mark.slow
def test_the_three_modes_get_the_same_requests_and_do_the_same_work(measured: Path) -> None:
    runs = _runs(measured)
    assert [(run["mode"], run["concurrency"]) for run in runs] == [
        (mode, level) for mode in ("core", "e2e", "chat") for level in (1, 4)
    ]
    work = [[(s["input_tokens"], s["output_tokens"]) for s in run["samples"]] for run in runs]
    assert all(counts == work[0] for counts in work)
    assert len(set(work[0])) > 3
    assert "/v1/completions" in runs[-1]["what"]
    assert "token ids" in runs[-1]["what"]


@pytest.mark.slow
def test_times_are_in_order(measured: Path) -> None:
    for run in _runs(measured):
        for sample in run["samples"]:
            assert not sample["error"]
            times = [sample[name] for name in ("began", "first", "last", "ended")]
            assert times == sorted(times)
        if run["concurrency"] == 1:
            ordered = [time for s in run["samples"] for time in (s["began"], s["ended"])]
            assert ordered == sorted(ordered)
        stats = run["stats"]
        assert stats["TTFT p50 (ms)"] <= stats["TTFT p99 (ms)"] < stats["P99 latency (ms)"]
        assert stats["Avg. InFlight requests"] <= run["concurrency"] * 1.001


def test_the_files_of_a_run(measured: Path) -> None:
    assert len(list(csv.reader((measured / "stats.csv").read_text().splitlines()))) == 1 + 6
    assert len(list(csv.reader((measured / "requests.csv").read_text().splitlines()))) == 1 + 6 * 12
    assert (measured / "load.svg").read_text().startswith("<svg")


def test_what_is_printed(up: Up, stack: Stack, capsys: pytest.CaptureFixture[str]) -> None:
    load = ["--concurrency", "2", "--num-requests", "4", *RANDOM]
    assert _bench(up, "core,chat", *load) == 0
    out, err = capsys.readouterr()
    assert "| chat - core |" in out
    assert "Requests/Sec" in out
    assert "TTFT" not in out  # not streamed, so there is no TTFT
    assert "core, 2 at a time: 4 of 4" in err


def test_a_command_of_upstreams_script_runs_as_it_is(
    up: Up, stack: Stack, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Check options with underscores or dashes, and options after the workload as in older
    releases.
    """
    file = tmp_path / "prompts.json"
    file.write_text(json.dumps([{"input": "", "instruction": "Hello", "output": "a b c"}] * 9))
    model = ["--tokenizer_dir", str(MODEL), "--tokenizer_type", "llama"]
    options = ["-i", "grpc", "--request_rate", "50", "--max_input_len=100", "--concurrency", "2"]
    for load, workload in (
        (options, ["dataset", "--dataset", str(file), "--num_requests", "3", *model]),
        (
            [*options, *model, "--num-requests", "3"],
            [
                *("token_norm_dist", "--input_mean", "8", "--input_stdev", "0"),
                *("--output_mean", "4", "--output_stdev", "0"),
            ],
        ),
    ):
        capsys.readouterr()
        found = tmp_path / "found.json"
        assert _bench(up, "core", "--json", str(found), *load, *workload) == 0
        [run] = json.loads(found.read_text())
        assert len(run["samples"]) == 3
    with pytest.raises(SystemExit):
        _bench(up, "core", "-i", "http", "dataset", "--dataset", str(file))
    assert "-i/--protocol: found 'http'; Triton is asked over grpc alone" in capsys.readouterr().err


def test_a_dataset_goes_through_the_chat_template(
    up: Up, stack: Stack, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    entry = {"input": "Count from 1 to 9", "instruction": "now", "output": "1 2 3 4"}
    file = tmp_path / "data.json"
    file.write_text(json.dumps([entry] * 3))
    found = tmp_path / "all.json"
    arguments = ["--json", str(found), "dataset", "--dataset", str(file)]
    assert _bench(up, "chat", "-S", "--request-rate", "50", *arguments) == 0
    assert "/v1/chat/completions" in capsys.readouterr().out
    [run] = json.loads(found.read_text())
    assert [sample["output_tokens"] for sample in run["samples"]] == [5, 5, 5]
    starts = [sample["began"] for sample in run["samples"]]
    assert starts[0] < starts[1] < starts[2]


@pytest.mark.parametrize("mode", ["core", "e2e", "chat"])
def test_failures_are_counted_and_shown(
    up: Up, stack: Stack, capsys: pytest.CaptureFixture[str], mode: str
) -> None:
    too_long = ["token-norm-dist", "--input-mean", "2100", "--input-stdev", "0"]
    too_long += ["--output-mean", "4", "--output-stdev", "0"]
    assert _bench(up, mode, "--num-requests", "2", *too_long) == 1
    out = capsys.readouterr().out
    assert "2 requests failed: " in out
    assert "2100" in out


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["core", "--url", "127.0.0.1:1", "--tokenizer-dir", "demo/model"], "refused"),
        (["chat", "--gateway-url", "http://127.0.0.1:1"], "http://127.0.0.1:1"),
        (["core", "--max-input-len", "1"], "--max-input-len"),
        (["core", "--request-rate", "0"], "--request-rate"),
        (["core", "--tokenizer-dir", "nowhere"], "nowhere"),
    ],
)
def test_what_cannot_be_measured_is_said(
    up: Up, stack: Stack, capsys: pytest.CaptureFixture[str], arguments: list[str], error: str
) -> None:
    assert _bench(up, *arguments, *RANDOM) == 2
    assert error in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["all,core"], ["gpu"], ["core", "--plot", "x.png"]])
def test_wrong_command_lines(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(["bench", *arguments, *RANDOM])
    assert exit_info.value.code == 2

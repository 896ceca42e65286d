"""Parts of the load test that need no server: requests, arrivals, statistics, tables, plots."""

from __future__ import annotations

import asyncio
import csv
import io
import json
import math
import random
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.tokenization.prompts import Prompts
from ops.loadtest import report
from ops.loadtest.arrivals import send_times
from ops.loadtest.plot import latency_against_load
from ops.loadtest.progress import Progress
from ops.loadtest.requests import BenchRequest, FromDataset, FromHistogram, FromNormal
from ops.loadtest.running import run as run_load
from ops.loadtest.sample import BenchRun, Mode, Sample, append, percentile
from ops.loadtest.targets import GatewayTarget
from tests.support.patience import PATIENCE_S
from tests.support.triton_server import MODEL


@pytest.fixture(scope="module")
def prompts() -> Iterator[Prompts]:
    loaded = Prompts.load(MODEL)
    yield loaded
    loaded.close()


def _write(file: Path, value: object) -> Path:
    file.write_text(json.dumps(value))
    return file


def test_a_dataset_in_the_reference_form(prompts: Prompts, tmp_path: Path) -> None:
    entries = [
        {"input": "Hello", "instruction": "Say it back", "output": "one two three four"},
        {"input": "x " * 500, "instruction": "", "output": "too long a prompt"},
        {"input": "No", "instruction": "answer", "output": ""},
        {"input": "Third", "instruction": "", "output": "one"},
    ]
    source = FromDataset(_write(tmp_path / "d.json", entries), 1.3)
    found = source.requests(prompts, 10, 100, random.Random(0))
    assert [(r.text, r.output_tokens) for r in found] == [("Hello Say it back", 5), ("Third ", 1)]
    assert found[0].ids == prompts.tokenizer.encode("Hello Say it back").ids
    assert len(source.requests(prompts, 1, None, random.Random(0))) == 1


def test_a_dataset_of_conversations(prompts: Prompts, tmp_path: Path) -> None:
    talk = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "one two"}]
    entries = [{"conversations": talk}, {"conversations": talk[:1]}]
    source = FromDataset(_write(tmp_path / "d.json", entries), 1.0)
    found = source.requests(prompts, 10, None, random.Random(0))
    assert [(r.text, r.output_tokens) for r in found] == [("Hi", 2)]


@pytest.mark.parametrize(("content", "error"), [({}, "not a JSON list"), ([{"a": 1}], "entry 0")])
def test_what_is_no_dataset(prompts: Prompts, tmp_path: Path, content: object, error: str) -> None:
    source = FromDataset(_write(tmp_path / "d.json", content), 1.3)
    with pytest.raises(ValueError, match=error):
        source.requests(prompts, 1, None, random.Random(0))


def test_random_prompts_are_the_same_as_ids_and_as_text(prompts: Prompts) -> None:
    source = FromNormal((50.0, 20.0), (30.0, 10.0))
    found = source.requests(prompts, 200, None, random.Random(3))
    for request in found:
        assert prompts.tokenizer.encode(request.text, add_special_tokens=False).ids == request.ids
        assert 0 <= min(request.ids) <= max(request.ids) < prompts.vocab_size
    inputs = [len(request.ids) for request in found]
    outputs = [request.output_tokens for request in found]
    # The means of 200 samples are within four standard errors.
    assert abs(sum(inputs) / 200 - 50) < 4 * 20 / math.sqrt(200)
    assert abs(sum(outputs) / 200 - 30) < 4 * 10 / math.sqrt(200)
    assert min(inputs) >= 1
    assert min(outputs) >= 1
    assert len({tuple(request.ids) for request in found}) > 190
    assert found == source.requests(prompts, 200, None, random.Random(3))
    assert found != source.requests(prompts, 200, None, random.Random(4))


def test_prompts_that_are_too_long_are_left_out(prompts: Prompts) -> None:
    found = FromNormal((50.0, 20.0), (3.0, 0.0)).requests(prompts, 50, 50, random.Random(0))
    assert 0 < len(found) < 50
    assert all(len(request.ids) <= 50 for request in found)


def test_lengths_from_a_histogram(prompts: Prompts, tmp_path: Path) -> None:
    histogram = {
        "chat_ip": {"buckets": [8, 16], "freqs": [1, 3]},
        "chat_op": {"buckets": [5], "freqs": [9]},
        "bad_ip": {"buckets": [8], "freqs": [1, 2]},
    }
    file = _write(tmp_path / "h.json", histogram)
    found = FromHistogram(file, "chat").requests(prompts, 200, None, random.Random(0))
    lengths = [len(request.ids) for request in found]
    assert set(lengths) == {8, 16}
    assert 120 < lengths.count(16) < 180
    assert {request.output_tokens for request in found} == {5}
    for key in ("bad", "none"):
        with pytest.raises(ValueError, match=f"{key}_ip"):
            FromHistogram(file, key).requests(prompts, 1, None, random.Random(0))


def test_arrivals() -> None:
    rng = random.Random(0)
    assert send_times(3, -1, "exponential_dist", rng) == [0.0, 0.0, 0.0]
    assert send_times(3, 4.0, "constant", rng) == [0.0, 0.25, 0.5]
    times = send_times(2001, 50.0, "exponential_dist", rng)
    gaps = [b - a for a, b in pairwise(times)]
    mean = sum(gaps) / 2000
    assert abs(mean - 0.02) < 4 * 0.02 / math.sqrt(2000)
    # In a Poisson process, a fraction of 1/e of the gaps exceeds the mean.
    assert abs(sum(gap > 0.02 for gap in gaps) / 2000 - 1 / math.e) < 0.05
    for rate in (0.0, -2.0, math.nan):
        with pytest.raises(ValueError, match="--request-rate"):
            send_times(1, rate, "constant", rng)


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=300), st.integers(1, 100))
def test_percentiles_are_those_of_the_reference_tool(values: list[float], percent: int) -> None:
    found = percentile(values, percent / 100)
    assert found == sorted(values)[-(-len(values) * percent // 100) - 1]


def test_percentiles_of_nothing() -> None:
    assert math.isnan(percentile([], 0.5))


def _run(mode: Mode, level: int | None, factor: float = 1.0) -> BenchRun:
    samples = [
        Sample(
            number,
            began=0.1 * number,
            ended=0.1 * number + factor * 0.2,
            first=0.1 * number + factor * 0.05,
            last=0.1 * number + factor * 0.15,
            input_tokens=10,
            output_tokens=11,
        )
        for number in range(10)
    ]
    samples.append(Sample(10, 0.0, 0.01, error="too, long"))
    return BenchRun(mode, f"{mode} somehow", level, samples)


def test_figures() -> None:
    found = report.stats(_run("core", 2))
    expected = {
        "Requests/Sec": 10 / 1.1,
        "OP tokens/sec": 110 / 1.1,
        "Avg. latency (ms)": 200.0,
        "P99 latency (ms)": 200.0,
        "P90 latency (ms)": 200.0,
        "Avg. IP tokens per request": 10.0,
        "Avg. OP tokens per request": 11.0,
        "Avg. InFlight requests": 2000 / 1100,
        "Total latency (ms)": 1100.0,
        "Total requests": 11.0,
        "Failed requests": 1.0,
        "P50 latency (ms)": 200.0,
        "TTFT p50 (ms)": 50.0,
        "TTFT p90 (ms)": 50.0,
        "TTFT p99 (ms)": 50.0,
        "Inter-token latency p50 (ms)": 10.0,
        "Inter-token latency p90 (ms)": 10.0,
        "Inter-token latency p99 (ms)": 10.0,
    }
    assert list(found) == list(expected)
    assert found == pytest.approx(expected)


def test_turns_are_put_together_without_the_time_between_them() -> None:
    samples = [Sample(0, 0.0, 1.0)]
    append(samples, [Sample(0, 0.5, 2.0, first=0.75, last=1.5), Sample(1, 0.5, 0.6, error="no")])
    assert samples == [
        Sample(0, 0.0, 1.0),
        Sample(1, 1.5, 3.0, first=1.75, last=2.5),
        Sample(2, 1.5, 1.6, error="no"),
    ]


def test_a_run_in_which_all_failed_has_figures() -> None:
    run = BenchRun("chat", "", None, [Sample(0, 0.0, 0.1, error="no")])
    assert report.stats(run)["Failed requests"] == 1
    assert "1 requests failed: no" in report.text([run])
    ET.fromstring(latency_against_load([run]))


def test_modes_stand_side_by_side_with_their_difference() -> None:
    text = report.text([_run("core", 4), _run("e2e", 4), _run("chat", 4, factor=1.5)])
    rows = [[c.strip() for c in line.split("|")[1:-1]] for line in text.splitlines()]
    assert ["Stat", "core", "e2e", "chat", "chat - core"] in rows
    assert ["Avg. latency (ms)", "200.00", "200.00", "300.00", "100.00"] in rows
    assert ["Total requests", "11", "11", "11", "0"] in rows
    assert "4 at a time:" in text
    assert "chat: chat somehow" in text


def test_csv_files(tmp_path: Path) -> None:
    runs = [_run("core", 1), _run("chat", 8)]
    report.write_stats_csv(runs[:1], tmp_path / "one.csv")
    head, row = list(csv.reader((tmp_path / "one.csv").read_text().splitlines()))
    assert head[:10] == [
        "Requests/Sec",
        "OP tokens/sec",
        "Avg. latency (ms)",
        "P99 latency (ms)",
        "P90 latency (ms)",
        "Avg. Input tokens per request",
        "Avg. Output tokens per request",
        "Avg. InFlight requests",
        "Total latency (ms)",
        "Total requests",
    ]
    assert row[2] == "200.00"
    report.write_requests_csv(runs, tmp_path / "all.csv")
    lines = list(csv.DictReader((tmp_path / "all.csv").read_text().splitlines()))
    assert len(lines) == 22
    assert lines[0]["latency_ms"] == "200.000"
    assert lines[0]["inter_token_ms"] == "10.000"
    assert (lines[10]["ttft_ms"], lines[10]["error"]) == ("", "too, long")
    assert {line["mode"] for line in lines} == {"core", "chat"}
    report.write_json(runs, tmp_path / "all.json")
    found = json.loads((tmp_path / "all.json").read_text())
    assert [run["concurrency"] for run in found] == [1, 8]
    assert found[0]["stats"]["Avg. latency (ms)"] == pytest.approx(200)


def test_the_picture_has_a_line_for_each_figure_and_a_point_for_each_level() -> None:
    levels = (1, 2, 8)
    runs = [_run(mode, n, n) for mode in ("core", "chat") for n in levels]  # type: ignore[arg-type]
    space = "{http://www.w3.org/2000/svg}"
    root = ET.fromstring(latency_against_load(runs))
    lines = list(root.iter(f"{space}polyline"))
    assert len(lines) == 8
    for line in lines:
        points = [tuple(map(float, p.split(","))) for p in line.attrib["points"].split()]
        assert len(points) == 3
        # The plot's points rise with the load and are inside the picture.
        assert points == sorted(points)
        assert [y for _, y in points] == sorted((y for _, y in points), reverse=True)
        assert all(0 < x < 720 and 0 < y < 400 for x, y in points)
    words = [element.text for element in root.iter(f"{space}text")]
    assert {"1", "2", "8", "core P99 latency", "chat TTFT p50"} <= set(words)


_USAGE = b'data: {"choices": [], "usage": {"prompt_tokens": 2, "completion_tokens": 3}}\n\n'
_TOKEN = b'data: {"choices": [{"text": "a"}]}\n\n'


@pytest.mark.parametrize(
    ("status", "body", "error"),
    [
        (200, _TOKEN + _USAGE + b"data: [DONE]\n\n", ""),
        (200, _TOKEN + b'data: {"error": {"message": "engine died"}}\n\n', "engine died"),
        (200, _TOKEN, "ended before"),
        (200, b"<html>no gateway</html>", "ended before"),
        (200, b"data: {no json}\n\n", "not OpenAI's"),
        (503, b'{"error": {"message": "busy"}}', "busy"),
        (502, b"<html>bad gateway</html>", "bad gateway"),
    ],
)
async def test_an_answer_that_is_not_whole_is_a_failure(
    status: int, body: bytes, error: str
) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        head = f"HTTP/1.1 {status} x\r\nconnection: close\r\n\r\n"
        writer.write(head.encode() + body)
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1")
    port = server.sockets[0].getsockname()[1]
    async with server, httpx.AsyncClient(trust_env=False, timeout=PATIENCE_S) as http:
        url = f"http://127.0.0.1:{port}"
        target = GatewayTarget(http, url, "m", through_template=False, streaming=True)
        request = BenchRequest("a b", [1, 2], 3)
        [sample] = await run_load(target, [request], [0.0], 1, 30.0, lambda *_: None)
    assert error in sample.error
    assert bool(sample.error) == bool(error)
    assert (sample.input_tokens, sample.output_tokens) == ((0, 0) if error else (2, 3))


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_rewrites_its_line_on_a_terminal_only() -> None:
    for out, rewrites in ((io.StringIO(), False), (_Terminal(), True)):
        progress = Progress(out)
        progress.begin("core")
        progress.update("core", 1, 0, 2)
        progress.update("core", 2, 1, 2)
        assert out.getvalue().endswith("core: 2 of 2, 1 failed\n")
        assert ("\r" in out.getvalue()) == rewrites
        assert "1 of 2" not in out.getvalue()

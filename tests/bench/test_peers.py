"""The gateway compared with compiled peers: the smallest run, and notes on missing peers."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest

from bench.beside import QUICK_STREAMS
from bench.servers import Bench, Unmeasured
from bench.wheels import importable


class Quiet:
    def log(self, line: str) -> None:
        pass


def test_what_cannot_be_had_is_told_and_not_measured() -> None:
    with pytest.raises(Unmeasured, match=r"nothing could not be installed: .*no_such_folder"):
        importable(cast(Bench, Quiet()), "nothing", ["./no_such_folder"], ["no_such_module"])


@pytest.mark.nightly
def test_peers_are_measured_where_they_can_be_had(tmp_path: Path) -> None:
    """Check that each peer is measured. A peer with wrong answers would be left out."""
    command = [sys.executable, "-m", "bench", "--quick", "--seconds", "0.8", "--rounds", "1"]
    done = subprocess.run(
        [*command, "--only", "peers", "--output", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    results = json.loads((tmp_path / "results.json").read_text())
    missing = [note for note in results["notes"] if "could not be installed" in note]
    if not results["parts"].get("peers") and missing:
        pytest.skip(missing[0])
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {row.pop("what"): row for row in results["parts"]["peers"]}
    assert missing or {"SMG 1.13.0", "Dynamo 1.6.1"} <= set(rows["MiB at start"]), results["notes"]
    assert rows["MiB at start"]["relay in C"] < 10 or shutil.which("gcc") is None
    for name, row in rows.items():
        assert math.isfinite(row["gateway"]), name
        # Some results may be missing: a peer may never stop abandoned requests, Dynamo's worker
        # cannot be called without Dynamo to measure the added time, and a peer without CPU time in
        # its window has neither a first token nor a ratio.
        known = [
            value
            for peer, value in row.items()
            if not ("added" in name and "Dynamo" in peer) and row.get(peer.removeprefix("of ")) != 0
        ]
        may_miss = "stop" in name or "first token" in name
        assert may_miss or all(map(math.isfinite, known)), name
    assert rows["stopped of 20 left before the first token"]["gateway"] == 20


@pytest.mark.nightly
def test_first_tokens_beside_streams_are_measured(tmp_path: Path) -> None:
    results = measured("beside", tmp_path)
    rows = results["parts"]["beside"]
    found = [(row["who"], row["other streams"]) for row in rows]
    servers = ("gateway", "SMG 1.13.0")
    assert found == [(server, count) for server in servers for count in QUICK_STREAMS]
    for row in rows:
        # On a busy machine, a window of one second may end before the first answer.
        assert {"first token p50 ms", "more than alone"} <= row.keys()
        assert math.isfinite(row["CPU us/token"]) == (row["other streams"] > 0)
    assert math.isfinite(rows[1]["of SMG 1.13.0"])


@pytest.mark.nightly
def test_prompts_are_measured_beside_smg(tmp_path: Path) -> None:
    rows = measured("prompts", tmp_path)["parts"]["prompts"]
    assert {row["prompts of"] for row in rows} == {
        "the project's pages",
        "new passages",
        "random words",
        "pages not seen before",
    }
    for row in rows:
        assert all(math.isfinite(value) for name, value in row.items() if "ms" in name), row
    # CPU times are compared, since other processes affect elapsed time.
    cpu_ms = {row["each"]: row["gateway: CPU ms"] for row in rows[:6]}
    assert cpu_ms["250 tokens"] < cpu_ms["32,000 tokens"]


def measured(part: str, folder: Path) -> dict[str, Any]:
    """Return the results of a short run of one part. Skip if SMG cannot be installed."""
    command = [sys.executable, "-m", "bench", "--quick", "--seconds", "1", "--rounds", "1"]
    done = subprocess.run(
        [*command, "--only", part, "--output", str(folder)],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    results: dict[str, Any] = json.loads((folder / "results.json").read_text())
    if missing := [note for note in results["notes"] if "could not be installed" in note]:
        pytest.skip(missing[0])
    assert done.returncode == 0, done.stdout + done.stderr
    return results

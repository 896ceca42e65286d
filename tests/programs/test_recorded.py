"""Stored requests: private data is replaced, and nothing else."""

from __future__ import annotations

import json
import platform
from pathlib import Path

import pytest

from tests.programs import recorded
from tests.programs.installed import Installed
from tests.programs.program import Result
from tests.programs.programs import PROGRAMS
from tests.programs.recorder import Exchange, Message


def test_the_host_is_replaced_as_a_word_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorded, "FOLDER", tmp_path)
    monkeypatch.setattr(platform, "node", lambda: "vm")
    body = json.dumps({"input": "Host:\nvm, not llvm", "call_id": "call_" + "avm0" * 6})
    request = Message("POST /v1/responses HTTP/1.1", {}, body.encode())
    exchange = Exchange(request, Message("HTTP/1.1 200 OK", {}, b"{}"))
    program = Installed(PROGRAMS["codex"], "1.0", tmp_path)
    recorded.record(program, Result([], "", [exchange], 0.0), tmp_path / "work")
    stored = json.loads((tmp_path / "codex-1.0" / "1.json").read_text(encoding="utf-8"))
    assert stored["body"] == {
        "input": "Host:\nhost, not llvm",
        "call_id": "call_" + "1".rjust(24, "0"),
    }

"""`gateway lora agent`: what it says of a command that cannot be."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.commands import gateway

URL = "redis://127.0.0.1:1/0"


@pytest.mark.parametrize(
    ("changed", "url", "why"),
    [
        ({}, "", "set GATEWAY_REDIS_URL, as for the gateways"),
        ({}, "http://SECRET", "a Redis URL begins with redis://"),
        ({"--replica": "triton"}, URL, "--replica: found 'triton', allowed HOST:PORT"),
        ({"--max-bytes": "1GiB"}, URL, "--max-bytes: found '1GiB', allowed a number of bytes"),
        ({"--max-bytes": "0"}, URL, "--max-bytes: found '0', allowed a number of bytes"),
        ({"--grace": "nan"}, URL, "--grace: found 'nan', allowed a number of seconds, 0 or more"),
        ({"--grace": "-1"}, URL, "--grace: found '-1', allowed a number of seconds, 0 or more"),
        ({"--path": "adapters"}, URL, "--path: found 'adapters', allowed an absolute path"),
    ],
)
def test_what_cannot_be_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: dict[str, str], url: str, why: str
) -> None:
    monkeypatch.setenv("GATEWAY_REDIS_URL", url)
    options = {"--replica": "triton:8001", "--max-bytes": "1000"} | changed
    words = [word for option in options.items() for word in option]
    answer = gateway("lora", "agent", tmp_path / "disk", *words)
    assert answer.returncode != 0
    assert why in answer.stderr
    assert "SECRET" not in answer.stderr
    assert not (tmp_path / "disk").exists()


def test_a_folder_that_cannot_be_made_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GATEWAY_REDIS_URL", URL)
    (tmp_path / "file").touch()
    answer = gateway(
        *("lora", "agent", tmp_path / "file" / "disk", "--replica", "t:1", "--max-bytes", "1")
    )
    assert answer.returncode == 1
    assert str(tmp_path / "file") in answer.stderr

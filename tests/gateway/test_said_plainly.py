"""Errors in the environment of a gateway: the start fails with a line that names the cause."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from gateway.config.file import ConfigurationError
from tests.support.adapter_store import becomes
from tests.support.gateway_process import tenant, write_config
from tests.support.in_process import running, save_tokenizer
from tests.support.redis_server import running_redis

NOBODY = "127.0.0.1:1"
SECRET = "wrong-and-secret"


@pytest.mark.parametrize(
    ("query", "why"),
    [
        (f"?password={SECRET}", "it refuses the user or password of its URL"),
        (f"?username=bob&password={SECRET}", "it refuses the user or password of its URL"),
        ("", "it refuses the user or password of its URL"),
        (".not", "no such file or directory"),
    ],
)
async def test_a_redis_that_cannot_be_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, query: str, why: str
) -> None:
    save_tokenizer(tmp_path)
    (tmp_path / "redis.conf").write_text("requirepass right\n")
    config = write_config(tmp_path / "c.yaml", tenant("acme", "sk-acme"))
    expected = [
        f"Redis is away, continuing from disk: Redis cannot be used: {why}",
        "keys made over the API are not accepted yet: state of the release before cannot be read: "
        f"Redis: {why}",
        "weights and drains that admins have set do not apply yet: state of the release before "
        f"cannot be read: Redis: {why}",
        f"Redis is away ({why}); limits are counted as when_redis_is_away says",
        f"conversations are not shared now: Redis fails: {why}",
    ]

    def said() -> list[str]:
        texts = [record.getMessage() for record in caplog.records]
        return [text for text in texts if why in text]

    with running_redis(tmp_path / "redis.conf") as redis:
        settings = {"redis_url": redis.url + query, "config": config}
        async with running(tmp_path, NOBODY, ready=False, **settings):
            await becomes(lambda: set(expected) <= set(said()))
    assert sorted(said()) == sorted(expected)
    assert SECRET not in caplog.text


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({}, "no tokenizer.json or tokenizer.model in {folder}"),
        ({"tokenizer.json": ""}, "{folder}/tokenizer.json: EOF while parsing"),
        ({"tokenizer.json": "{}"}, "{folder}/tokenizer.json: Model missing"),
        ({"tokenizer.model": "?"}, "{folder}/tokenizer.model: "),
        ({"tokenizer_config.json": "{"}, "{folder}/tokenizer_config.json: Expecting property"),
        ({"tokenizer_config.json": "[]"}, "{folder}/tokenizer_config.json: expected a JSON object"),
        ({"generation_config.json": "{"}, "{folder}/generation_config.json: Expecting property"),
        ({"chat_template.jinja": "{% if %}"}, "{folder}: Expected an expression"),
    ],
    ids=str,
)
async def test_a_tokenizer_folder_that_is_none(
    tmp_path: Path, files: dict[str, str], said: str
) -> None:
    if files and not any(name.startswith("tokenizer.") for name in files):
        save_tokenizer(tmp_path)
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(ConfigurationError) as raised:
        async with running(tmp_path, NOBODY, ready=False):
            pass
    said = f"GATEWAY_TOKENIZER_DIR: {said.format(folder=tmp_path)}"
    assert str(raised.value).startswith(said)


async def test_what_only_transformers_reads_says_so_where_that_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names the package transformers, which the container image does not have."""
    monkeypatch.setitem(sys.modules, "transformers", None)
    (tmp_path / "tokenizer.model").write_text("?")
    with pytest.raises(ConfigurationError, match=r"tokenizer\.model: only transformers can"):
        async with running(tmp_path, NOBODY, ready=False):
            pass


def _started(folder: Path) -> subprocess.Popen[str]:
    inherited = {name: value for name, value in os.environ.items() if "GATEWAY_" not in name}
    settings = {
        "GATEWAY_PORT": "0",
        "GATEWAY_TRITON_GRPC": NOBODY,
        "GATEWAY_TOKENIZER_DIR": str(folder),
        "GATEWAY_STORE_DIR": str(folder / "adapters"),
    }
    command = [sys.executable, "-m", "gateway"]
    return subprocess.Popen(
        command, env=inherited | settings, stderr=subprocess.PIPE, text=True, bufsize=1
    )


def test_a_process_ends_with_that_line(tmp_path: Path) -> None:
    with _started(tmp_path) as process:
        _, said = process.communicate(timeout=60)
    assert (process.returncode, said) == (
        2,
        f"gateway: GATEWAY_TOKENIZER_DIR: no tokenizer.json or tokenizer.model in {tmp_path}\n",
    )


def test_ctrl_c_is_no_failure(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    with _started(tmp_path) as process:
        assert process.stderr is not None
        assert any("listening on 127.0.0.1 port " in line for line in process.stderr)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    assert "Application shutdown complete" in said
    assert "Traceback" not in said
    assert process.returncode == 128 + signal.SIGINT

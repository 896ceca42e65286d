"""`gateway key`: a key is shown once, and only its hash is stored."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gateway.config.tenants import key_hash
from tests.support.gateway_process import tenant, write_config


def _key(*arguments: object, typed: str = "") -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if "GATEWAY_" not in name}
    command = [sys.executable, "-m", "ops", "key", *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, env=env, input=typed, timeout=60
    )


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return write_config(tmp_path / "gateway.yaml", tenant("acme", "sk-old"))


def test_a_new_key_and_what_the_file_needs(config: Path) -> None:
    first, second = (_key("new", "--tenant", "acme", "--config", config) for _ in range(2))
    key, line = first.stdout.splitlines()
    assert key.startswith("sk-")
    assert len(key) == len("sk-") + 43  # 256 bits
    assert line == f"- {key_hash(key)}"
    assert key not in first.stderr
    assert first.stdout != second.stdout
    number = int(first.stderr.rpartition(":")[2].strip(" .\n"))
    lines = config.read_text().splitlines()
    assert lines[number - 1].strip().endswith("keys:")


def test_the_new_key_is_the_tenants_once_its_hash_is_in_the_file(tmp_path: Path) -> None:
    key = _key("new", "--tenant", "acme").stdout.splitlines()[0]
    config = write_config(tmp_path / "gateway.yaml", tenant("acme", key))
    answer = _key("check", "--config", config, typed=key + "\n")
    assert (answer.returncode, answer.stdout.splitlines()[1]) == (0, "the key is acme's")
    assert key not in config.read_text()


def test_a_key_that_is_nobodys(config: Path) -> None:
    answer = _key("check", "--config", config, typed="sk-guess\n")
    assert (answer.returncode, answer.stdout.splitlines()[1]) == (1, "the key belongs to nobody")
    assert "sk-guess" not in answer.stdout + answer.stderr


def test_no_key_checks_the_file_alone(config: Path) -> None:
    answer = _key("check", "--config", config)
    assert (answer.returncode, answer.stdout) == (0, f"{config}: tenants: 1, keys: 1\n")


def test_a_tenant_that_is_not_there_and_a_file_that_is_wrong(config: Path) -> None:
    answer = _key("new", "--tenant", "other", "--config", config)
    assert answer.returncode == 1
    assert "has no tenant 'other'; it has: acme" in answer.stderr
    config.write_text("tenants: 3\n")
    answer = _key("check", "--config", config)
    assert answer.returncode == 1
    assert f"{config}:1: tenants: found '3'; must be a list" in answer.stderr


def test_a_key_for_an_admin(config: Path) -> None:
    answer = _key("new", "--admin", "--config", config)
    assert answer.returncode == 0
    assert "admin_keys" in answer.stderr

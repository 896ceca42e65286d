"""`gateway lora agent`: errors for invalid options, and the configuration from valid ones."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from lora_store.redis import RedisSettings
from tests.support.adapter_store import becomes, store_gateway
from tests.support.commands import gateway
from tests.support.lora_files import BASE, linear_content
from tests.support.peft_agents import AgentNotices
from tests.support.redis_server import RedisServer

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


async def test_a_model_yaml_without_a_rank_says_that_of_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, redis_server: RedisServer
) -> None:
    monkeypatch.setenv("GATEWAY_REDIS_URL", redis_server.url)
    yaml = tmp_path / "model.yaml"
    yaml.write_text("lora_config: {lora_target_modules: [attn_q]}")
    settings = RedisSettings(redis_server.url, prefix="lora:demo", timeout_s=30.0)
    fits, large = linear_content(0, rank=64), linear_content(1, rank=65)
    command = [sys.executable, "-m", "ops", "lora", "agent", tmp_path / "disk"]
    command += ["--replica", "triton:8001", "--max-bytes", "1000000", "--model-yaml", yaml]
    command += ["--model-name", "demo"]
    told = AgentNotices(settings)
    told.notices.put_base(BASE)
    async with store_gateway(tmp_path / "a", settings) as store:
        await store.registry.add("fits", "demo", fits, "test")
        await store.registry.add("large", "demo", large, "test")
        agent = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        try:
            await becomes(
                lambda: any(len(h.holds) + len(h.refused) == 2 for h in told.agents().values())
            )
            [held] = told.agents().values()
        finally:
            agent.kill()
            agent.wait()
    told.notices.close()
    assert held.refused == {large.digest: "its rank is 65; the engine's max_lora_rank is 64"}

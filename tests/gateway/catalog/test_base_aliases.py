"""Adapters whose base model has another name: refused with advice, or served by an alias."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from adapters import base_model_json
from adapters.base_model import read_base_model
from gateway.config.settings import Settings
from gateway.config.tenants import key_hash, new_key
from tests.support.adapter_store import becomes
from tests.support.disk_engine import DiskEngine, save_model
from tests.support.fake_triton import serving
from tests.support.gateway_process import write_config
from tests.support.in_process import running
from tests.support.lora_files import qv_tensors, write_peft

ADMIN = new_key()
TRAINED_ON = "unsloth/Other-8B-Instruct-unsloth-bnb-4bit"
ALIAS = "unsloth/Other-8B-Instruct"
WHAT_TO_DO = (
    f"found {TRAINED_ON}; allowed: demo, model (if it is the same model, set "
    f"GATEWAY_BASE_MODEL_ALIASES='[\"{ALIAS}\"]' or, in the file of GATEWAY_CONFIG, "
    f'base_model_aliases: ["{ALIAS}"])'
)
NOTE = "trained on weights quantized as unsloth-bnb-4bit"


def _write_config(path: Path, **sections: Any) -> Path:
    return write_config(path, **{"admin_keys": [key_hash(ADMIN)], **sections})


@contextlib.asynccontextmanager
async def _gateway(
    folder: Path, *, sections: dict[str, Any] | None = None, **settings: Any
) -> AsyncIterator[tuple[httpx.AsyncClient, Any]]:
    home = folder / "model"
    home.mkdir()
    fields = {"model_name": "demo", "adapter_root": folder, "adapter_sources": [str(folder)]}
    fields["config"] = _write_config(folder / "gateway.yaml", **(sections or {}))
    async with serving(DiskEngine(home)) as endpoint:
        started = running(save_model(home), endpoint, **{**fields, **settings})
        async with started as (client, service, _):
            await asyncio.wait_for(service.started.wait(), 60)
            client.headers["authorization"] = f"Bearer {ADMIN}"
            yield client, service


def _adapter(folder: Path, trained_on: str = TRAINED_ON) -> Path:
    tensors = qv_tensors(seed=1)
    return write_peft(folder / "adapter", tensors, base_model_name_or_path=trained_on)


async def _upload(client: httpx.AsyncClient, folder: Path, base: str = "demo") -> httpx.Response:
    files = [("file", (path.name, path.read_bytes())) for path in sorted(folder.iterdir())]
    return await client.post("/v1/adapters", data={"name": "mine", "base": base}, files=files)


async def _name_source(client: httpx.AsyncClient, folder: Path) -> httpx.Response:
    body = {"name": "mine", "base": "demo", "source": str(folder)}
    return await client.post("/v1/adapters", json=body)


async def _load_as_vllm(client: httpx.AsyncClient, folder: Path) -> httpx.Response:
    body = {"lora_name": "mine", "lora_path": str(folder)}
    return await client.post("/v1/load_lora_adapter", json=body)


WAYS = pytest.mark.parametrize("way", [_upload, _name_source, _load_as_vllm])
Way = Callable[[httpx.AsyncClient, Path], Awaitable[httpx.Response]]


@WAYS
async def test_another_name_is_refused_with_the_setting_that_takes_it(
    tmp_path: Path, way: Way
) -> None:
    async with _gateway(tmp_path) as (client, _):
        answer = await way(client, _adapter(tmp_path))
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, "adapter_base_mismatch")
    assert WHAT_TO_DO in error["message"]


@pytest.mark.parametrize("where", ["variable", "file"])
@WAYS
async def test_an_alias_takes_a_quantized_copy_with_a_note(
    tmp_path: Path, way: Way, where: str, caplog: pytest.LogCaptureFixture
) -> None:
    aliases = {"base_model_aliases": [ALIAS]}
    given = aliases if where == "variable" else {"sections": aliases}
    async with _gateway(tmp_path, **given) as (client, service):
        with caplog.at_level(logging.WARNING):
            answer = await way(client, _adapter(tmp_path))
        assert answer.status_code in (200, 201), answer.text
        assert service.adapters.record("mine").version.base == "demo"
    assert f"adapter 'mine': the adapter was {NOTE}" in caplog.text
    if way is not _load_as_vllm:
        assert any(NOTE in warning for warning in answer.json()["warnings"])


async def test_a_quantized_copy_of_the_own_name_needs_no_alias(tmp_path: Path) -> None:
    async with _gateway(tmp_path) as (client, _):
        answer = await _upload(client, _adapter(tmp_path, "someone/demo-AWQ"))
        assert answer.status_code == 201, answer.text
        assert any("quantized as AWQ" in warning for warning in answer.json()["warnings"])
        plain = await _upload(client, _adapter(tmp_path, "someone/demo"))
        assert plain.json()["warnings"] == []


async def test_nothing_of_an_author_is_shown_to_be_pasted_but_a_name(tmp_path: Path) -> None:
    async with _gateway(tmp_path) as (client, _):
        answer = await _upload(client, _adapter(tmp_path, "x'; rm -rf ~; '"))
        message = answer.json()["error"]["message"]
        assert "GATEWAY_BASE_MODEL_ALIASES" not in message
        assert "if it is the same model, write one of these into base_model_name_or_path" in message


async def test_an_adapter_of_zeros_is_served_with_a_note(tmp_path: Path) -> None:
    tensors = {
        name: value * np.float32(-0.0) if "lora_B" in name else value
        for name, value in qv_tensors(seed=1).items()
    }
    folder = write_peft(tmp_path / "adapter", tensors)
    async with _gateway(tmp_path) as (client, _):
        answer = await _upload(client, folder)
        assert answer.status_code == 201, answer.text
        assert any("answers as the base model does" in each for each in answer.json()["warnings"])
        # A tiny alpha has the same effect, because it rounds all of B to zero.
        write_peft(folder, qv_tensors(seed=1), lora_alpha=1e-12)
        answer = await _upload(client, folder)
        assert any("answers as the base model does" in each for each in answer.json()["warnings"])


async def test_no_other_model_is_guessed(tmp_path: Path) -> None:
    async with _gateway(tmp_path, base_model_aliases=[ALIAS]) as (client, _):
        for other in ("unsloth/Other-8B", "unsloth/Other-70B-Instruct", "demo-Instruct"):
            answer = await _upload(client, _adapter(tmp_path, other))
            assert answer.json()["error"]["code"] == "adapter_base_mismatch", other
            assert f'base_model_aliases: ["{other}"]' in answer.json()["error"]["message"]
        # Owners are compared if both names have one.
        answer = await _upload(client, _adapter(tmp_path, "someone/Other-8B-Instruct"))
        assert answer.json()["error"]["code"] == "adapter_base_mismatch"


async def test_a_request_may_name_the_base_by_an_alias(tmp_path: Path) -> None:
    async with _gateway(tmp_path, base_model_aliases=[ALIAS]) as (client, _):
        answer = await _upload(client, _adapter(tmp_path), base=ALIAS)
        assert (answer.status_code, answer.json().get("base")) == (201, "demo")
        body = {
            "lora_name": "too",
            "lora_path": str(tmp_path / "adapter"),
            "base_model_name": ALIAS,
        }
        assert (await client.post("/v1/load_lora_adapter", json=body)).status_code == 200
        refused = await _upload(client, _adapter(tmp_path), base="llama")
        assert f"base: found llama; allowed: demo, {ALIAS}" in refused.json()["error"]["message"]


async def test_gateway_adapters_are_told_of_at_the_start(tmp_path: Path) -> None:
    async with _gateway(tmp_path, adapters={"mine": _adapter(tmp_path)}) as (_, service):
        await becomes(lambda: "mine" in service.adapter_admin.refused)
        assert WHAT_TO_DO in service.adapter_admin.refused["mine"]


async def test_aliases_of_the_file_are_there_for_gateway_adapters(tmp_path: Path) -> None:
    aliases = {"base_model_aliases": [ALIAS]}
    given = {"mine": _adapter(tmp_path)}
    async with _gateway(tmp_path, sections=aliases, adapters=given) as (_, service):
        await becomes(lambda: service.adapters.has("mine"))


async def test_a_declared_adapter_comes_with_the_reload_that_brings_its_alias(
    tmp_path: Path,
) -> None:
    declared = {"adapters": [{"name": "mine", "source": str(_adapter(tmp_path))}]}
    async with _gateway(tmp_path, sections=declared) as (client, service):
        await becomes(lambda: any(each.error for each in service.declared.read_report()))
        [told] = (await client.get("/v1/adapters")).json()["declared"]
        assert WHAT_TO_DO in (told["error"] or "")
        _write_config(tmp_path / "gateway.yaml", base_model_aliases=[ALIAS], **declared)
        service.configuration.reload_now()
        await becomes(lambda: service.declared.counts()["loaded"] == 1)
        assert service.adapters.record("mine").version.added_by == "configuration"


@pytest.mark.parametrize(
    ("aliases", "words"),
    [
        ([""], r"\[0\]: found ''; must not be empty"),
        (["a", "A-bnb-4bit"], r"\[1\]: found 'A-bnb-4bit'; it is there already"),
        (["a/b/c"], "must be NAME or OWNER/NAME"),
        ([f"a{n}" for n in range(33)], "has 33 names; at most 32 are allowed"),
    ],
)
def test_aliases_of_the_variable_are_checked(
    tmp_path: Path, aliases: list[str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GATEWAY_BASE_MODEL_ALIASES", json.dumps(aliases))
    with pytest.raises(ValueError, match=words):
        Settings(tokenizer_dir=tmp_path)


def test_all_aliases_there_may_be_are_told_to_agents(tmp_path: Path) -> None:
    save_model(tmp_path)
    names = tuple(f"{n:02}" + "\U0001f600" * 126 for n in range(64))
    base = read_base_model(tmp_path, names)
    assert base_model_json.parse(base_model_json.dump(base)) == base

"""Fused layers of adapters, which are laid out for engines of one tp_size only."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from adapters import npy, peft
from adapters.base_model import read_base_model
from adapters.convert import convert
from adapters.errors import UnsupportedModule
from adapters.record_json import as_json, from_json
from lora_store.disk import Disk
from tests.support.adapter_store import becomes
from tests.support.fake_triton import FakeTriton, serving
from tests.support.in_process import running, save_tokenizer
from tests.support.lora_files import pair, write_peft

DATA = Path(__file__).parents[2] / "data" / "lora"
PHI = DATA / "phi3-all-r4"
MODEL = "base-phi3"
MODULES = ["attn_qkv", "attn_dense", "mlp_gate_up", "mlp_4h_to_h"]


class Engine(FakeTriton):
    """A Triton whose engine has its config.json in `folder`."""

    def __init__(self, folder: Path) -> None:
        super().__init__(tokens=[1], fault=None, step=1)
        self.folder = folder

    async def ModelConfig(self, request: Any, context: Any) -> Any:
        answer = await super().ModelConfig(request, context)
        answer.config.input.add(name="lora_config", data_type="TYPE_INT32")
        answer.config.input.add(name="lora_weights", data_type="TYPE_FP16")
        answer.config.parameters["gpt_model_path"].string_value = str(self.folder)
        return answer

    @property
    def adapted(self) -> int:
        """Number of requests that used an adapter."""
        tensors = [{tensor.name for tensor in request.inputs} for request in self.requests]
        return sum("lora_task_id" in names for names in tensors)

    @property
    def weights(self) -> bytes:
        """Adapter weights that the first request uploaded."""
        return bytes(self.requests[0].raw_input_contents[-1])


def _build(folder: Path, tp_size: int, *modules: str) -> Path:
    """Write an engine's config.json with the LoRA modules `MODULES` and `modules`."""
    whole = json.loads((DATA / MODEL / "config.json").read_text())
    sizes = ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers")
    model = {name: whole[name] for name in (*sizes, "num_key_value_heads")}
    model |= {"architecture": "Phi3ForCausalLM", "dtype": "float16"}
    model["mapping"] = {"world_size": tp_size, "tp_size": tp_size, "pp_size": 1}
    build = {
        "max_seq_len": 64,
        "plugin_config": {"lora_plugin": "auto"},
        "lora_config": {"lora_target_modules": [*MODULES, *modules], "max_lora_rank": 8},
    }
    folder.mkdir(exist_ok=True)
    config = {"pretrained_config": model, "build_config": build}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _laid_out(tmp_path: Path, tp_size: int) -> bytes:
    base = read_base_model(_build(tmp_path / "expected", tp_size), (MODEL,))
    return bytes(convert(peft.read(PHI), base).weights)


@contextlib.asynccontextmanager
async def _gateway(
    tmp_path: Path, *folders: Path
) -> AsyncIterator[tuple[httpx.AsyncClient, Any, list[Engine]]]:
    """Run a gateway with an engine for each folder. All gateways of a test share one store."""
    home = tmp_path / MODEL
    home.mkdir(exist_ok=True)
    save_tokenizer(home)
    (home / "tokenizer_config.json").write_text('{"eos_token": "!"}')
    (home / "config.json").write_bytes((DATA / MODEL / "config.json").read_bytes())
    engines = [Engine(folder) for folder in folders]
    async with contextlib.AsyncExitStack() as stack:
        endpoints = [await stack.enter_async_context(serving(engine)) for engine in engines]
        started = running(home, ",".join(endpoints), model_name=MODEL)
        client, service, _ = await stack.enter_async_context(started)
        await becomes(lambda: all(replica.ready for replica in service.replicas))
        yield client, service, engines


async def _add(service: Any, source: Path = PHI) -> Any:
    return (
        await service.adapter_admin.add("phi", MODEL, source, source="test", within=None)
    ).record


async def _ask(client: httpx.AsyncClient, model: str = "phi") -> httpx.Response:
    return await client.post("/v1/completions", json={"model": model, "prompt": "x"})


def _is_refused(answer: httpx.Response, made: int, engine: int) -> bool:
    words = f"laid out for tp_size {made} and the engine has tp_size {engine}; add the adapter"
    return answer.status_code == 500 and words in answer.json()["error"]["message"]


async def test_a_rebuilt_engine_is_not_given_the_old_layout(tmp_path: Path) -> None:
    engine_dir = tmp_path / "engine"
    async with _gateway(tmp_path, _build(engine_dir, 1)) as (client, service, [engine]):
        old = (await _add(service)).version
        assert (await _ask(client)).status_code == 200
        assert engine.weights == _laid_out(tmp_path, 1)
    async with _gateway(tmp_path, _build(engine_dir, 2)) as (client, service, [engine]):
        assert _is_refused(await _ask(client), 1, 2)
        assert not engine.requests
        new = (await _add(service)).version
        assert (await _ask(client)).status_code == 200
        assert engine.weights == _laid_out(tmp_path, 2)
        assert _is_refused(await _ask(client, f"phi@{old.short_digest}"), 1, 2)
    # The engine has its first tp_size again, and both versions are stored.
    async with _gateway(tmp_path, _build(engine_dir, 1)) as (client, service, [engine]):
        assert _is_refused(await _ask(client, f"phi@{new.short_digest}"), 2, 1)
        assert (await _add(service)).served == old.digest
        assert (await _ask(client)).status_code == 200


async def test_files_that_do_not_say_it_are_for_the_engine_that_was_there(tmp_path: Path) -> None:
    engine_dir, source = tmp_path / "engine", tmp_path / "source"
    source.mkdir()
    base = read_base_model(_build(tmp_path / "expected", 2), (MODEL,))
    npy.write(convert(peft.read(PHI), base), source)
    async with _gateway(tmp_path, _build(engine_dir, 1)) as (_, service, _):
        await _add(service, source)
    async with _gateway(tmp_path, _build(engine_dir, 2)) as (client, service, _):
        await _add(service, source)
        assert _is_refused(await _ask(client), 1, 2)
        await service.adapter_admin.remove("phi")
        await _add(service, source)
        assert (await _ask(client)).status_code == 200


async def test_what_is_from_before_is_served_as_it_was(tmp_path: Path) -> None:
    """A version of an earlier release records no tp_size, so it is served without a check."""
    engine_dir = tmp_path / "engine"
    async with _gateway(tmp_path, _build(engine_dir, 1)) as (_, service, _):
        await _add(service)
    disk = Disk(tmp_path / MODEL / "adapters" / MODEL)
    record = as_json(disk.records()["phi"])
    assert [version.pop("tp_size") for version in record["versions"]] == [1]
    disk.put_record(from_json(record))
    async with _gateway(tmp_path, _build(engine_dir, 2)) as (client, _, [engine]):
        assert (await _ask(client)).status_code == 200
        assert engine.adapted == 1


async def test_of_a_pool_of_both_those_of_its_tp_size_take_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    folders = [_build(tmp_path / f"tp{tp_size}", tp_size) for tp_size in (1, 2)]
    async with _gateway(tmp_path, *folders) as (client, service, engines):
        made = (await _add(service)).version.tp_size
        able, unable = engines if made == 1 else reversed(engines)
        answers = await asyncio.gather(*[_ask(client) for _ in range(12)])
        assert {answer.status_code for answer in answers} == {200}
        assert (able.adapted, unable.adapted) == (12, 0)
        assert able.weights == _laid_out(tmp_path, made)
        await asyncio.gather(*[_ask(client, MODEL) for _ in range(12)])
        assert unable.requests
    [told] = [record.message for record in caplog.records if "of 2 kinds" in record.message]
    assert "adapters laid out for tp_size 1" in told
    assert "adapters laid out for tp_size 2" in told


async def test_where_the_engine_is_out_of_sight_the_operator_is_warned(tmp_path: Path) -> None:
    engine_dir = tmp_path / "engine"
    async with _gateway(tmp_path, engine_dir) as (client, service, [engine]):
        await _add(service)
        warning = service.adapter_admin.fit.warnings()["tp_size"]
        assert "phi (1)" in warning
        assert (await _ask(client)).status_code == 200
        assert engine.weights == _laid_out(tmp_path, 1)
    async with _gateway(tmp_path, _build(engine_dir, 2)) as (client, service, _):
        assert service.adapter_admin.fit.warnings() == {}
        assert _is_refused(await _ask(client), 1, 2)


async def test_layers_that_are_not_fused_fit_any_tp_size(tmp_path: Path) -> None:
    """Layers that are not fused have the same layout for every tp_size."""
    source = write_peft(
        tmp_path / "source",
        pair("model.layers.0.mlp.down_proj", 4, (48, 32)),
        base_model_name_or_path=MODEL,
    )
    async with _gateway(tmp_path, tmp_path / "engine") as (_, service, _):
        await _add(service, source)
        assert service.adapter_admin.fit.warnings() == {}
    async with _gateway(tmp_path, _build(tmp_path / "engine", 2)) as (client, _, _):
        assert (await _ask(client)).status_code == 200


async def test_an_engine_with_a_module_of_a_later_release_serves_adapters_without_it(
    tmp_path: Path,
) -> None:
    engine_dir = _build(tmp_path / "engine", 1, "mamba_in_proj")
    async with _gateway(tmp_path, engine_dir) as (client, service, [engine]):
        await _add(service)
        assert service.adapter_admin.fit.warnings() == {}
        assert (await _ask(client)).status_code == 200
        assert engine.weights == _laid_out(tmp_path, 1)
        module = "model.layers.0.mixer.in_proj"
        tensors = pair(module, 4, (32, 32))
        other = write_peft(tmp_path / "mamba", tensors, base_model_name_or_path=MODEL)
        with pytest.raises(UnsupportedModule, match=module):
            await _add(service, other)

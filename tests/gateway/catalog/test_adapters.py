"""Adapters by base model, and errors of engines that cannot serve an adapter."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models

from adapters.adapter import Converted
from adapters.errors import UnsupportedEngine
from gateway.catalog.adapters import AdapterCatalog
from gateway.catalog.administration import AdapterAdmin
from gateway.catalog.conversion import Converter
from gateway.catalog.engine_fit import EngineFit
from gateway.config.settings import Settings
from gateway.errors import EngineError, ModelNotFound
from gateway.generation.lora import Lora
from gateway.tokenization.prompts import Prompts
from gateway.triton.engine import Engine
from gateway.triton.model_capabilities import ModelCapabilities, TextModel
from tests.support.capabilities import CAPABILITIES
from tests.support.fake_triton import FakeTriton, serving
from tests.support.generations import generation
from tests.support.lora_files import content
from tests.support.redis_server import running_redis


@asynccontextmanager
async def _adapters(
    folder: Path, base: str, served: ModelCapabilities = CAPABILITIES, **settings: Any
) -> AsyncIterator[tuple[AdapterCatalog, AdapterAdmin]]:
    fields = {"model_name": base, "tokenizer_dir": folder, "store_dir": folder / "store"}
    prompts = Prompts(Tokenizer(models.BPE()), {}, [])
    known = Settings(**(fields | settings))
    converter = Converter(known, lambda: [served])
    async with AdapterCatalog(known, lambda: [served], converter.base_model) as adapters:
        fit = EngineFit(adapters, lambda: [served], converter.base_model)
        async with AdapterAdmin(known, adapters, converter, prompts, fit) as admin:
            yield adapters, admin


async def _add(adapters: AdapterCatalog, base: str, number: int) -> None:
    await adapters.registry.add("zh", base, content(number), "test")


@pytest.fixture
def redis_url() -> Iterator[str]:
    with running_redis() as server:
        yield server.url


async def test_an_adapter_is_served_on_its_own_base_only(tmp_path: Path, redis_url: str) -> None:
    shared = {"redis_url": redis_url}
    async with _adapters(tmp_path, "one", **shared) as (one, _):
        await _add(one, "one", 1)
        assert one.resolve("zh")[1].digest == content(1).digest
        async with _adapters(tmp_path, "org/two", **shared) as (two, _):
            assert two.records == []
            with pytest.raises(ModelNotFound):
                two.resolve("zh")
            # The same name on another base is another adapter.
            await _add(two, "org/two", 2)
            assert two.resolve("zh")[1].digest == content(2).digest
        assert one.resolve("zh")[1].digest == content(1).digest


async def test_weights_of_another_type_are_not_served(tmp_path: Path) -> None:
    served = replace(CAPABILITIES, lora_dtype="bfloat16")
    async with _adapters(tmp_path, "one", served) as (adapters, _):
        await _add(adapters, "one", 1)
        with pytest.raises(EngineError, match="add the adapter again"):
            adapters.resolve("zh")


async def test_a_model_that_loses_adapters_is_named(tmp_path: Path) -> None:
    served = replace(CAPABILITIES, text=TextModel(loses_lora=True), lora_dtype=None)
    async with _adapters(tmp_path, "one", served) as (_, admin):
        with pytest.raises(UnsupportedEngine, match="found a BLS model before v0"):
            await admin.add("zh", "one", tmp_path, source="test", within=None)


async def test_an_engine_folder_out_of_sight_breaks_neither_adding_nor_metrics(
    tmp_path: Path,
) -> None:
    (tmp_path / "config.json").write_text(
        '{"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 2, "hidden_size": 8,'
        ' "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 12}'
    )
    async with _adapters(tmp_path, "one") as (adapters, admin):
        await _add(adapters, "one", 1)
        assert admin.fit.compute_cache_fit() is None
        assert admin.fit.warnings() == {}


@pytest.mark.parametrize("variable", ["GATEWAY_ADMIN_KEY", "GATEWAY_REDIS_URL"])
def test_an_empty_variable_is_unset(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, variable: str
) -> None:
    monkeypatch.setenv(variable, "")
    settings = Settings(tokenizer_dir=tmp_path)
    assert getattr(settings, variable.removeprefix("GATEWAY_").lower()) is None


async def test_an_engine_that_forgets_what_it_is_given_is_not_asked_for_ever() -> None:
    servicer = FakeTriton(tokens=[1], fault="error", step=0)
    servicer.error = "LoRA task 7 not found in cache. Please send LoRA weights with request"

    async def weights() -> Converted:
        return content(1)

    asked = generation(lora=Lora("zh", 7, 2**20, weights))
    async with serving(servicer) as endpoint:
        engine = Engine(
            endpoint,
            "tensorrt_llm",
            vocab_size=256,
            max_seq_len=64,
            on_stop=lambda reason: None,
            on_upload=lambda sent: None,
        )
        await engine.refresh()
        deadline = asyncio.get_running_loop().time() + 60
        with pytest.raises(EngineError), engine.generate(asked, deadline) as tokens:
            await tokens.first()
        await engine.close()
    assert len(servicer.requests) == 1
    assert servicer.stopped == []
    assert not engine.residency.budget.active

"""LoRA adapters with their own chat template: rendering, versions, and permission to upload one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer

from gateway.config.tenants import new_key
from tests.support.adapter_store import becomes
from tests.support.fake_triton import FakeTriton, serving
from tests.support.in_process import ids_of, running, save_tokenizer
from tests.support.lora_files import qv_tensors, write_peft
from tests.support.redis_server import RedisServer

ADMIN = new_key()
AUTHORIZED = {"authorization": f"Bearer {ADMIN}"}
OWN, END = "{% for m in messages %}[{{ m.content }}]{% endfor %}", "<|im_end|>"
BASE = "{% for m in messages %}{{ m.content }};{% endfor %}"
THINKING = BASE + "{# </think> #}{{ eos_token }}"
ASKED = [{"role": "user", "content": "hi"}]
SHAPES = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 2,
    "hidden_size": 8,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 12,
}


class LoraTriton(FakeTriton):
    """A fake Triton whose model accepts LoRA adapters."""

    async def ModelConfig(self, request: Any, context: Any) -> Any:
        answer = await super().ModelConfig(request, context)
        answer.config.input.add(name="lora_weights", data_type="TYPE_FP16")
        answer.config.input.add(name="lora_config", data_type="TYPE_INT32")
        return answer


def _base(folder: Path) -> Path:
    folder.mkdir()
    save_tokenizer(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens([END, "<|eos|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<|eos|>", "chat_template": BASE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text(json.dumps(SHAPES))
    return folder


def _adapter(folder: Path, template: str | None = None, **config: Any) -> Path:
    write_peft(folder, qv_tensors(), base_model_name_or_path="m")
    if template is not None:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


async def _upload(client: httpx.AsyncClient, name: str, folder: Path) -> httpx.Response:
    files = [("file", (path.name, path.read_bytes())) for path in sorted(folder.iterdir())]
    form = {"name": name, "base": "m"}
    return await client.post("/v1/adapters", data=form, files=files, headers=AUTHORIZED)


async def _prompt(client: httpx.AsyncClient, model: str) -> str:
    """Return the text of the prompt that the gateway renders and sends to the model."""
    body = {"model": model, "messages": ASKED}
    ids = (await client.post("/tokenize", json=body)).json()["tokens"]
    chat = (await client.post("/v1/chat/completions", json=body | {"max_tokens": 1})).json()
    assert chat["usage"]["prompt_tokens"] == len(ids)
    text: str = (await client.post("/detokenize", json={"tokens": ids})).json()["prompt"]
    return text


async def test_a_template_belongs_to_its_version_on_all_gateways(
    tmp_path: Path, redis_server: RedisServer
) -> None:
    engine = LoraTriton(tokens=[1], fault=None, step=0)
    shared = {"admin_key": ADMIN, "redis_url": redis_server.url, "trust_adapter_templates": True}
    async with (
        serving(engine) as endpoint,
        running(_base(tmp_path / "a"), endpoint, **shared) as (one, _, _),
        running(_base(tmp_path / "b"), endpoint, **shared) as (two, other, _),
    ):
        plain = await _upload(one, "plain", _adapter(tmp_path / "plain", BASE))
        assert plain.status_code == 201, plain.text
        first = (await _upload(one, "own", _adapter(tmp_path / "first", OWN))).json()
        second = (await _upload(one, "own", _adapter(tmp_path / "second", OWN + "!"))).json()
        # The weights are identical, so all versions have one task id: the engine stores the weights
        # once.
        versions = [*plain.json()["versions"], *second["versions"]]
        assert len({version["digest"] for version in versions}) == 3
        assert len({version["task_id"] for version in versions}) == 1

        def known(revision: int) -> bool:
            return {r.name: r.revision for r in other.adapters.records}.get("own") == revision

        for client in (one, two):
            await becomes(lambda: known(second["revision"]))
            assert await _prompt(client, "m") == await _prompt(client, "plain") == "hi;"
            assert await _prompt(client, "own") == "[hi]!"
            assert await _prompt(client, f"own@{first['served']}") == "[hi]"
        path = "/v1/adapters/own/rollback"
        rolled = (await one.post(path, json={}, headers=AUTHORIZED)).json()
        await becomes(lambda: known(rolled["revision"]))
        for client in (one, two):
            assert await _prompt(client, "own") == "[hi]"
            verified = await client.post("/v1/adapters/own/verify", headers=AUTHORIZED)
            assert verified.json()["verified"] is True


async def test_its_forms_and_its_end_are_those_of_the_template(tmp_path: Path) -> None:
    folder, text = _base(tmp_path / "base"), f"<think>hm</think>4{END}"
    output = ids_of(folder, text)
    engine = LoraTriton(tokens=output, fault=None, step=0)
    # An adapter that the settings name may have a template: the operator chose its folder.
    own = {"own": _adapter(tmp_path / "own", THINKING, eos_token={"content": END})}
    async with (
        serving(engine) as endpoint,
        running(folder, endpoint, adapters=own) as (client, service, _),
    ):
        await service.started.wait()
        assert service.adapter_admin.refused == {}
        body: dict[str, Any] = {"messages": ASKED, "max_tokens": len(output)}
        base, adapter = [
            (await client.post("/v1/chat/completions", json=body | {"model": model})).json()
            for model in ("m", "own")
        ]
        assert await _prompt(client, "own") == f"hi;{END}"
    choice = base["choices"][0]
    assert choice["message"]["content"] == "<think>hm</think>4"
    assert choice["finish_reason"] == "length"
    choice = adapter["choices"][0]
    assert choice["message"]["reasoning_content"] == "hm"
    assert choice["message"]["content"] == "4"
    assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("trust", "template", "config", "named"),
    [
        # Without trust, the template is not even compiled: Jinja evaluates constants while it
        # compiles.
        (False, "{{ 'a' * 10 }", {}, "GATEWAY_TRUST_ADAPTER_TEMPLATES"),
        (False, OWN, {}, "GATEWAY_TRUST_ADAPTER_TEMPLATES"),
        (False, BASE, {"eos_token": END}, "GATEWAY_TRUST_ADAPTER_TEMPLATES"),
        (True, "{{ 'a' * 10 }", {}, "unexpected '}'"),
        (True, "{{ " + "(1+1)*" * 3000 + "1 }}", {}, "nested too deeply"),
        (True, OWN, {"eos_token": "<|new|>"}, "the eos_token '<|new|>'"),
        (
            True,
            OWN + "<|new|>",
            {"added_tokens_decoder": {"258": {"content": "<|new|>"}}},
            "'<|new|>' as token 258",
        ),
    ],
)
async def test_what_is_not_taken_is_refused_by_name(
    tmp_path: Path, trust: bool, template: str, config: dict[str, Any], named: str
) -> None:
    engine = LoraTriton(tokens=[1], fault=None, step=0)
    changed = {"admin_key": ADMIN, "trust_adapter_templates": trust}
    async with (
        serving(engine) as endpoint,
        running(_base(tmp_path / "base"), endpoint, **changed) as (client, service, _),
    ):
        refused = await _upload(client, "own", _adapter(tmp_path / "own", template, **config))
        assert refused.status_code == 400
        assert named in refused.json()["error"]["message"]
        assert service.adapters.records == []
        # A copy of the base model's template is allowed, as are special tokens that no template
        # uses.
        harmless = {"added_tokens_decoder": {"999": {"content": "[PAD]"}}, "eos_token": "<|eos|>"}
        taken = await _upload(client, "own", _adapter(tmp_path / "same", BASE + "\n", **harmless))
        assert taken.status_code == 201, taken.text

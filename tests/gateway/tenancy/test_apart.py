"""Isolation of tenants' prompts: cached-token counts and routing do not reveal other prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.fake_triton import FakeTriton, serving
from tests.support.gateway_process import tenant, write_config
from tests.support.in_process import ids_of, running, save_tokenizer

KEYS = {"acme": "sk-the-key-of-acme", "other": "sk-the-key-of-other"}
PROMPTS = [f"{number:02}" + "x" * 100 for number in range(16)]


async def _complete(client: httpx.AsyncClient, who: str, prompt: str) -> dict[str, Any]:
    headers = {"authorization": f"Bearer {KEYS[who]}"}
    body = {"model": "m", "prompt": prompt}
    answer = await client.post("/v1/completions", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def _streamed_usage(client: httpx.AsyncClient, who: str) -> dict[str, Any]:
    headers = {"authorization": f"Bearer {KEYS[who]}"}
    body = {"model": "m", "prompt": PROMPTS[0], "stream": True}
    body["stream_options"] = {"include_usage": True}
    answer = await client.post("/v1/completions", json=body, headers=headers)
    events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    assert events.pop() == "[DONE]"
    usage: dict[str, Any] = json.loads(events[-1])["usage"]
    return usage


@pytest.mark.parametrize("trust", [False, True])
async def test_prompts_of_others_are_not_met_unless_all_trust_each_other(
    tmp_path: Path, trust: bool
) -> None:
    save_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "!"}')
    engines = [FakeTriton(tokens=ids_of(tmp_path, at), fault=None, step=0) for at in "ab"]
    config = write_config(tmp_path / "c.yaml", *[tenant(*each) for each in KEYS.items()])
    settings = {"config": config, "tenants_trust_each_other": trust, "max_seq_len": 256}
    async with (
        serving(engines[0]) as first,
        serving(engines[1]) as second,
        running(tmp_path, f"{first},{second}", **settings) as (client, _, _),
    ):
        homes: dict[str, list[str]] = {}
        for who in KEYS:
            answers = [await _complete(client, who, prompt) for prompt in PROMPTS]
            homes[who] = [answer["choices"][0]["text"] for answer in answers]
            assert {"prompt_tokens_details" in answer["usage"] for answer in answers} == {trust}
            assert ("prompt_tokens_details" in await _streamed_usage(client, who)) is trust
            # Each tenant's repeated prompts go to the same replicas again.
            again = [await _complete(client, who, prompt) for prompt in PROMPTS]
            assert [answer["choices"][0]["text"] for answer in again] == homes[who]
        assert (homes["acme"] == homes["other"]) is trust

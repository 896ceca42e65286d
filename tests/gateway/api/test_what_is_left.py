"""Memory of a request during its answer: schemas that the prompt does not contain are freed."""

from __future__ import annotations

import asyncio
import gc
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.fake_triton import FakeTriton, serving
from tests.support.in_process import ids_of, running, save_tokenizer

MARK = "a_property_of_no_other_schema"
PROPERTIES = {MARK: {"enum": ["x"]}}  # gc tracks only dicts that hold containers
SCHEMA = {"type": "object", "properties": PROPERTIES}
SAID = [{"role": "user", "content": "2+2?"}]
CHAT = {
    "messages": SAID,
    "tools": [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}],
}
RESPONSE = {
    "input": SAID,
    "store": False,
    "tools": [{"type": "function", "name": "f", "parameters": SCHEMA}],
}
MESSAGE = {
    "messages": SAID,
    "max_tokens": 8,
    "tools": [{"name": "f", "input_schema": SCHEMA}],
}
THINKS = "{{ messages | length }}<think></think>"
HARMONY = "<|start|>user<|message|>{{ messages | length }}<|end|><|start|>assistant<|channel|>"


def _schemas() -> list[object]:
    """Return the copies of `PROPERTIES` that exist in this process."""
    gc.collect()
    found = [one for one in gc.get_objects() if type(one) is dict and MARK in one]
    return [one for one in found if one is not PROPERTIES]


@pytest.mark.parametrize("template", [THINKS, HARMONY], ids=["thinks", "harmony"])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("chat/completions", CHAT | {"tool_choice": "none"}),
        ("responses", RESPONSE | {"tool_choice": "none"}),
        ("messages", MESSAGE | {"tool_choice": {"type": "none"}}),
        ("chat/completions", CHAT | {"tool_choice": "required"}),
        ("responses", RESPONSE | {"tool_choice": {"type": "function", "name": "f"}}),
        ("messages", MESSAGE | {"tool_choice": {"type": "any"}}),
    ],
)
async def test_schemas_of_tools_go_before_the_answer_comes(
    tmp_path: Path, template: str, path: str, body: dict[str, Any]
) -> None:
    """Schemas are freed if no tool may be called, or if the guide enforces a call."""
    save_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(template)
    engine = FakeTriton(tokens=ids_of(tmp_path, "44"), fault="slow", step=1)
    async with (
        serving(engine) as endpoint,
        running(tmp_path, endpoint, max_seq_len=512) as (client, _, _),
        asyncio.timeout(300),
        asyncio.TaskGroup() as asking,
    ):
        answer = asking.create_task(client.post(f"/v1/{path}", json={"model": "m"} | body))
        while not engine.reached:
            assert not answer.done(), answer.result().text
            await asyncio.sleep(0.01)
        assert not _schemas()
        engine.released.set()
        assert isinstance(await answer, httpx.Response)
        assert answer.result().status_code == 200, answer.result().text

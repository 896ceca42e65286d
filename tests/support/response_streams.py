"""Requests of the Responses API, and their answers of given deltas, streamed and complete."""

from __future__ import annotations

import json
from typing import Any, cast

import orjson
from openai._streaming import SSEDecoder
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from gateway.api.responses.answers import ResponseAnswer
from gateway.api.responses.chats import Chat, parse
from gateway.api.responses.requests import ResponseRequest
from gateway.deltas import TextDelta
from gateway.generation import ANYBODY, Batch
from tests.support.generations import generation

QUESTION = {"role": "user", "content": "Hi"}
FUNCTION = {"type": "function", "name": "f"}
PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edits files",
    "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "x"'},
}


def chat(**fields: Any) -> Chat:
    return parse(ResponseRequest, orjson.dumps({"model": "m", "input": "Hi"} | fields)).request


def answer(**fields: Any) -> ResponseAnswer:
    return answer_to(chat(**fields))


def answer_to(wanted: Chat) -> ResponseAnswer:
    batch = Batch(
        request_id="r",
        generations=[generation()],
        prompts=1,
        choices=1,
        prompt_tokens=100,
        fingerprint="fp_0",
        caller=ANYBODY,
        timeout_s=9,
        deadline=9,
    )
    return ResponseAnswer(cast(Any, None), wanted, batch)


class Written:
    def __init__(self) -> None:
        self.data = b""

    def write(self, data: bytes) -> bool:
        self.data += data
        return True

    async def drain(self, by: float | None = None) -> None:
        pass


EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


def read(raw: bytes) -> dict[str, Any]:
    """The response that a stream ends with, which is what its events have made one by one."""
    output: list[dict[str, Any]] = []
    part: dict[str, Any] = {}
    last: dict[str, Any] = {}
    for number, event in enumerate(SSEDecoder().iter_bytes(iter([raw]))):
        data = event.json()
        EVENT.validate_json(event.data, strict=True)
        kind = data["type"]
        assert (event.event, data["sequence_number"]) == (kind, number)
        if number < 2:
            assert kind == ("response.created", "response.in_progress")[number]
            assert data["response"]["output"] == []
            continue
        assert not last
        if "response" in data:
            last = data
            continue
        index = data["output_index"]
        if kind == "response.output_item.added":
            assert index == len(output)
            output.append({"texts": {}, "open": data["item"]})
            assert data["item"]["status"] == "in_progress"
            continue
        item = output[index]
        assert index == len(output) - 1
        assert data.get("item_id", item["open"]["id"]) == item["open"]["id"]
        name = kind.removeprefix("response.").rpartition(".")
        if name[2] == "delta":
            item["texts"][name[0]] = item["texts"].get(name[0], "") + data["delta"]
        elif name == ("output_item", ".", "done"):
            item["done"] = data["item"]
        elif name[2] == "done" and name[0] not in ("content_part", "reasoning_summary_part"):
            whole = next(data[field] for field in ("text", "arguments", "input") if field in data)
            told = item["texts"].get(name[0], "")
            assert whole == told or (whole, told) == ("{}", "")
        elif name[2] == "added":
            part = data["part"]
            assert part["text"] == ""
        else:
            assert data["part"]["type"] in (part["type"], "reasoning_text")
    assert [item["done"] for item in output] == last["response"]["output"]
    assert last["type"].removeprefix("response.") == last["response"]["status"]
    found: dict[str, Any] = last["response"]
    return found


def streamed(deltas: list[TextDelta], **fields: Any) -> dict[str, Any]:
    body = Written()
    sink = answer(**fields).stream(body, "last")
    for delta in deltas:
        sink.accept(0, delta)
    return read(body.data)


def whole(deltas: list[TextDelta], **fields: Any) -> dict[str, Any]:
    body = answer(**fields).collected([deltas], keep=None)
    Response.model_validate_json(body, strict=True)
    found: dict[str, Any] = json.loads(body)
    return found

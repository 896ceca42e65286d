"""Readers of chat, response and message streams that accumulate events like clients."""

from __future__ import annotations

import json
from typing import Annotated, Any, get_args

from openai._streaming import SSEDecoder
from openai.types.responses import ResponseStreamEvent
from pydantic import Field, TypeAdapter


class Written:
    """A response body that records the written bytes."""

    def __init__(self) -> None:
        self.data = b""
        self.frames: list[bytes] = []

    def write(self, data: bytes) -> bool:
        self.data += data
        self.frames.append(data)
        return True

    async def drain(self, by: float | None = None) -> None:
        pass


def chat_choice_of(raw: bytes) -> dict[str, Any]:
    """Return the content, calls and finish reason of a stream with one choice."""
    choice: dict[str, Any] = {"content": None, "tool_calls": [], "finish_reason": None}
    calls: list[dict[str, Any]] = choice["tool_calls"]
    for event in SSEDecoder().iter_bytes(iter([raw])):
        for own in json.loads(event.data)["choices"]:
            choice["finish_reason"] = own["finish_reason"] or choice["finish_reason"]
            if content := own["delta"].get("content"):
                choice["content"] = (choice["content"] or "") + content
            for call in own["delta"].get("tool_calls", ()):
                index = call.pop("index")
                if "id" in call:
                    assert index == len(calls)
                    calls.append(call)
                    continue
                # A further delta of a call has one field, whose strings clients concatenate.
                [(kind, piece)] = call.items()
                for name, text in piece.items():
                    calls[index][kind][name] += text
    return choice


# Select the event class by the field `type`. Pydantic ignores the openai package's own annotation
# and would try some fifty classes for each event.
EVENT: TypeAdapter[Any] = TypeAdapter(
    Annotated[get_args(ResponseStreamEvent)[0], Field(discriminator="type")]
)


def response_of(raw: bytes) -> dict[str, Any]:
    """Return the final response of a stream, after checking that the events build the same
    response.
    """
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


def message_of(raw: bytes) -> dict[str, Any]:
    """Return the message that a stream's events build, after checking the order of the events."""
    events = list(SSEDecoder().iter_bytes(iter([raw])))
    message: dict[str, Any] = {}
    open_block: dict[str, Any] | None = None
    for event in events:
        data = event.json()
        assert event.event == data["type"]
        match data["type"]:
            case "message_start":
                assert not message
                message = data["message"]
            case "content_block_start":
                assert open_block is None
                assert data["index"] == len(message["content"])
                open_block = data["content_block"] | {"arguments": ""}
                message["content"].append(open_block)
            case "content_block_delta":
                assert open_block is not None
                assert data["index"] == len(message["content"]) - 1
                kind, text = data["delta"].values()
                field = {
                    "text_delta": "text",
                    "thinking_delta": "thinking",
                    "signature_delta": "signature",
                    "input_json_delta": "arguments",
                }[kind]
                open_block[field] += text
            case "content_block_stop":
                assert open_block is not None
                arguments = open_block.pop("arguments")
                if open_block["type"] == "tool_use":
                    open_block["input"] = json.loads(arguments or "{}")
                open_block = None
            case "message_delta":
                assert open_block is None
                message |= data["delta"]
                message["usage"] |= data["usage"]
    assert events[-1].event == "message_stop"
    return message

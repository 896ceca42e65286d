"""Random parameter values for each endpoint, with a given approximate size."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import orjson

Fields = dict[str, Any]
Fill = Callable[[random.Random, int], Any]
"""A function that generates a parameter's value with about this many bytes."""


def _value(draw: random.Random, size: int) -> Any:
    """Return a random JSON value."""
    if size < 16 or draw.random() < 0.1:
        return draw.choice(("", "a", 0, 1.5, None, True, [], {}, "é", "\\", '"'))
    kind = draw.randrange(5)
    if kind == 0:
        return draw.choice("a \\é<🦉") * (size // 4)
    unit = _value(draw, draw.choice((1, 8, size // 8)))
    count = max(size // (len(orjson.dumps(unit)) + 1), 1)
    if kind == 1:
        return {f"k{n}": unit for n in range(min(count, size // 8))}
    if kind == 2:
        for _ in range(min(size // 6, 90)):
            unit = [unit] if draw.random() < 0.5 else {"a": unit}
        return unit
    return [unit] * count


def _schema(draw: random.Random, size: int) -> Fields:
    if draw.random() < 0.4:
        tiny = draw.choice(([], {}, 0, "", "a", True))
        return {"type": "object", draw.choice(("anyOf", "enum", "x")): [tiny] * (size // 3)}
    inner: Any = draw.choice(
        (
            {"type": "string"},
            {"type": "integer"},
            {},
            {"$ref": "#"},
            {"enum": ["a"]},
            [],
            [],
            0,
            "a",
        )
    )
    for _ in range(draw.choice((0, 0, 0, 3, 30))):
        keyword = draw.choice(("items", "properties", "anyOf"))
        inner = {"type": "object", keyword: {"a": inner} if keyword == "properties" else inner}
    count = max(size // (len(orjson.dumps(inner)) + 10), 1)
    match draw.randrange(4):
        case 0:
            properties = {f"p{n}": inner for n in range(count)}
            return {"type": "object", "properties": properties, "required": [*properties]}
        case 1:
            return {"anyOf": [inner] * count}
        case 2:
            return {"type": "object", "properties": {"a": {"enum": _value(draw, size)}}}
        case _:
            return {"type": "object", "properties": {"a": _value(draw, size)}}


def _many(make: Fill, overhead: int, most: int = 10**6) -> Fill:
    """Return a generator of lists that have many small values or few large ones."""

    def fill(draw: random.Random, size: int) -> list[Any]:
        each = draw.choice((0, 0, 16, 100, size // 4))
        count = max(1, min(size // (each + overhead), most))
        return [make(draw, each) for _ in range(count)]

    return fill


def _text(draw: random.Random, size: int) -> str:
    return (
        draw.choice(("a", "a ", "\\", "é", "<|im_end|>", "</think><<<<<<<<", '{"a":', "!")) * size
    )[:size]


def _arguments(draw: random.Random, size: int) -> str:
    return orjson.dumps({"a": _value(draw, size // 2)}).decode()


def _tools(wrap: Callable[[str, Fields], Fields]) -> Fill:
    def fill(draw: random.Random, size: int) -> list[Fields]:
        count = draw.choice((1, 1, 8, 60, 128, 1000))
        each = max(size // count - 60, 0)
        schema = _schema(draw, each)
        return [wrap(f"f{n}", schema) for n in range(min(count, size // 60 + 1))]

    return fill


def _chat_message(draw: random.Random, size: int) -> Fields:
    match draw.randrange(4):
        case 0:
            return {"role": "user", "content": _text(draw, size)}
        case 1:
            part = {"type": "text", "text": draw.choice(("", "a"))}
            return {"role": "user", "content": [part] * max(size // 24, 1)}
        case 2:
            function = {"name": "f", "arguments": _arguments(draw, min(size, 2000))}
            call = {"id": "c", "type": "function", "function": function}
            return {"role": "assistant", "tool_calls": [call] * max(size // 90, 1)}
        case _:
            return {"role": draw.choice(("system", "assistant")), "content": _text(draw, size)}


def _message(draw: random.Random, size: int) -> Fields:
    kind = draw.randrange(4)
    if kind == 0:
        return {"role": "user", "content": _text(draw, size)}
    block: Fields = {"type": "text", "text": "a"}
    if kind == 1:
        block = {"type": "tool_use", "id": "a", "name": "f", "input": {"a": _value(draw, 8)}}
    if kind == 2:
        block = {"type": "thinking", "thinking": "a"}
    count = max(size // (len(orjson.dumps(block)) + 1), 1)
    return {"role": "user" if kind == 3 else "assistant", "content": [block] * count}


def _item(draw: random.Random, size: int) -> Fields:
    match draw.randrange(6):
        case 0:
            return {"role": "user", "content": _text(draw, size)}
        case 1:
            part = {"type": "input_text", "text": ""}
            return {"role": "user", "content": [part] * max(size // 32, 1)}
        case 2:
            call = {"type": "function_call", "call_id": "c", "name": "f"}
            return call | {"arguments": _arguments(draw, size)}
        case 3:
            return {"type": "function_call_output", "call_id": "c", "output": _text(draw, size)}
        case 4:
            return {"type": "reasoning", "summary": [{"type": "summary_text", "text": "a"}]}
        case _:
            function = {"type": "function", "name": "g", "parameters": _schema(draw, size)}
            return {"type": "additional_tools", "tools": [function]}


def _format(draw: random.Random, size: int) -> Fields:
    schema = _schema(draw, size)
    return {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}


def _unknown(draw: random.Random, size: int) -> Fields:
    return {f"u{n}": _value(draw, 8) for n in range(size // 12)}


def _structured_outputs(draw: random.Random, size: int) -> Fields:
    text = orjson.dumps(_schema(draw, size)).decode()
    choices = ["a"] * min(size // 4, 1024)
    return draw.choice(
        ({"json": text}, {"choice": choices}, {"regex": "(a|b)" * (size // 5)}, {"grammar": text})
    )


def _one_of(*values: Any) -> Fill:
    return lambda draw, _: draw.choice(values)


_GENERATION: Mapping[str, Fill] = {
    "logit_bias": lambda _, size: {str(n): 1 for n in range(min(size // 8, 1024))},
    "stop": _many(_text, 4, 16),
    "bad_words": lambda _, size: ["a" * 60] * min(64, size // 60 + 1),
    "stop_token_ids": _one_of([1] * 16),
    "n": _one_of(1, 4, 128),
    "response_format": _format,
    "structured_outputs": _structured_outputs,
    "stream": _one_of(True),
    "stream_options": _unknown,
    "truncate_prompt_tokens": _one_of(1, 1000),
    "user": _value,
    "metadata": _value,
    "": _unknown,
}


def _function(name: str, schema: Fields) -> Fields:
    return {"type": "function", "function": {"name": name, "parameters": schema}}


_TOOLS = _tools(_function)

PARAMETERS: Mapping[str, Mapping[str, Fill]] = {
    "/v1/chat/completions": {
        **_GENERATION,
        "messages": _many(_chat_message, 30, 2048),
        "tools": _TOOLS,
        "tool_choice": _one_of(
            "required", "none", {"type": "function", "function": {"name": "f0"}}
        ),
        "chat_template_kwargs": _value,
    },
    "/v1/completions": {
        **_GENERATION,
        "prompt": _many(
            lambda draw, size: draw.choice((_text(draw, size + 1), [1] * (size + 1))), 3
        ),
    },
    "/v1/messages": {
        "messages": _many(_message, 30, 2048),
        "system": _many(lambda draw, size: {"type": "text", "text": _text(draw, size)}, 26),
        "tools": _tools(lambda name, schema: {"name": name, "input_schema": schema}),
        "tool_choice": _one_of({"type": "any"}, {"type": "auto"}, {"type": "tool", "name": "f0"}),
        "output_format": lambda draw, size: {"type": "json_schema", "schema": _schema(draw, size)},
        "stop_sequences": _many(_text, 4, 16),
        "metadata": _value,
        "": _unknown,
    },
    "/v1/messages/count_tokens": {
        "messages": _many(_message, 30, 2048),
        "tools": _tools(lambda name, schema: {"name": name, "input_schema": schema}),
    },
    "/v1/responses": {
        "input": _many(_item, 40),
        "instructions": _text,
        "tools": _tools(
            lambda name, schema: {"type": "function", "name": name} | {"parameters": schema}
        ),
        "tool_choice": _one_of("required", "none", {"type": "function", "name": "f0"}),
        "text": lambda draw, size: {
            "format": {"type": "json_schema", "name": "a", "schema": _schema(draw, size)}
        },
        "truncation": _one_of("auto"),
        "include": lambda _, size: ["message.output_text.logprobs"] * (size // 32),
        "metadata": lambda _, size: {f"k{n}": "a" for n in range(size // 10)},
        "": _unknown,
    },
    "/v1/responses/input_tokens": {"input": _many(_item, 40), "truncation": _one_of("auto")},
    "/v1/embeddings": {
        "input": _many(
            lambda draw, size: draw.choice((_text(draw, size + 1), [1] * (size + 1))), 3, 2048
        )
    },
    "/v1/rerank": {
        "query": _text,
        "documents": _many(lambda draw, size: _text(draw, size + 1), 3, 2048),
    },
    "/tokenize": {
        "messages": _many(_chat_message, 30, 2048),
        "prompt": _text,
        "tools": _TOOLS,
        "return_token_strs": _one_of(True),
    },
    "/detokenize": {"tokens": lambda _, size: [1] * (size // 2)},
}
"""Generators by endpoint and parameter. The name "" generates unknown parameters."""

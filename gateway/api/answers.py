"""The text deltas of a request's choices to OpenAI's objects: SSE frames or one JSON body.

Streamed or not differs only here. A frame is prefix + JSON string + suffix, all but the text
prepared once per request (0.1 us a frame, against 5 us for building a model object).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import orjson

from gateway.deltas import Sink, TextDelta, TokenLogprob
from gateway.generation import Batch
from gateway.parsers.message import MessageEvent
from gateway.parsers.tools.events import CallArguments, CallStart, Content, Reasoning

Kind = Literal["chat", "completion"]
Logprobs = Callable[[list[TokenLogprob]], dict[str, Any]]
"""Writes log probabilities in the form of the endpoint."""

_NO_LOGPROBS = b',"logprobs":null'


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shape:
    """The bytes in which chat and completion objects differ. `%s` takes a JSON string."""

    id_prefix: str
    object: str
    chunk_object: str
    opening: bytes | None
    text: bytes
    closing: bytes


_SHAPES: dict[Kind, _Shape] = {
    "chat": _Shape(
        id_prefix="chatcmpl-",
        object="chat.completion",
        chunk_object="chat.completion.chunk",
        opening=b'"delta":{"role":"assistant","content":""}',
        text=b'"delta":{"content":%s}',
        closing=b'"delta":{}',
    ),
    "completion": _Shape(
        id_prefix="cmpl-",
        object="text_completion",
        chunk_object="text_completion",
        opening=None,
        text=b'"text":%s',
        closing=b'"text":""',
    ),
}


class _Frames:
    """The fixed bytes around the text of one choice, made once per request."""

    def __init__(
        self,
        *,
        shape: _Shape,
        head: bytes,
        index: int,
        usage: bytes,
        logprobs: Logprobs | None,
        prompt_ids: list[int] | None,
    ) -> None:
        """`prompt_ids`, unless None, go with the first frame, and each frame's ids with it."""
        self._logprobs = logprobs
        self._pending: list[TokenLogprob] = []
        self._ids: list[int] | None = None if prompt_ids is None else []
        before = b"data: " + head + b',"choices":[{"index":%d,' % index
        self._before = before
        self._usage = usage
        self._closing = before + shape.closing
        self._after = b',"finish_reason":null}]' + usage + b"}\n\n"
        text_before, text_after = shape.text.split(b"%s")
        self._text_before, self._text_after = before + text_before, text_after
        self._plain_after = text_after + _NO_LOGPROBS + self._after
        self._plain = logprobs is None and prompt_ids is None
        self._opening = b""
        if shape.opening:
            self._opening = before + shape.opening + _NO_LOGPROBS + self._after
        if prompt_ids is not None:
            prompt = b'"prompt_token_ids":' + orjson.dumps(prompt_ids) + b","
            self._opening = (before + prompt + b"%s" % (shape.opening or shape.closing)) + (
                _NO_LOGPROBS + self._after
            )

    def of(self, delta: TextDelta) -> bytes:
        """The frames of one delta: role once, text if any, the finish reason apart."""
        frames, self._opening = self._opening, b""
        if not self._plain:
            self._pending += delta.logprobs
            if self._ids is not None:
                self._ids += delta.ids
        if delta.events is not None:
            frames += b"".join([self._event(event) for event in delta.events])
        elif delta.text:
            after = self._plain_after
            if not self._plain:
                after = self._text_after + self._taken() + self._after
            frames += self._text_before + orjson.dumps(delta.text) + after
        if delta.finish is not None:
            frames += self._closing + self._taken()
            frames += b',"finish_reason":"' + delta.finish.encode() + b'"}]'
            frames += self._usage + b"}\n\n"
        return frames

    def _event(self, event: MessageEvent) -> bytes:
        delta = orjson.dumps(_event_delta(event))
        return self._before + b'"delta":' + delta + self._taken() + self._after

    def _taken(self) -> bytes:
        """What is told of the tokens since the last frame; text may lag behind them."""
        ids = b""
        if self._ids:
            ids = b',"token_ids":' + orjson.dumps(self._ids)
            self._ids = []
        if self._logprobs is None or not self._pending:
            return ids + _NO_LOGPROBS
        entries, self._pending = self._pending, []
        return ids + b',"logprobs":' + orjson.dumps(self._logprobs(entries))


def _event_delta(event: MessageEvent) -> dict[str, Any]:
    """A chunk's `delta`. Of a call, id, type and name come once: clients concatenate strings."""
    if isinstance(event, Content):
        return {"content": event.text}
    if isinstance(event, Reasoning):
        return {"reasoning_content": event.text}
    call: dict[str, Any] = {"index": event.index}
    if isinstance(event, CallStart):
        call |= {"id": event.call_id, "type": "function"}
        call["function"] = {"name": event.name, "arguments": ""}
    else:
        call["function"] = {"arguments": event.text}
    return {"tool_calls": [call]}


def _likeliest(choices: list[list[TextDelta]], of: int, keep: int) -> list[list[TextDelta]]:
    """Of each `of` choices the `keep` with the highest log probability per token."""

    def mean(deltas: list[TextDelta]) -> float:
        # An echoed prompt is the same for all; its delta has counted no token yet.
        own = [entry for delta in deltas if delta.tokens for entry in delta.logprobs]
        values = [entry.logprob for entry in own if entry.logprob is not None]
        return sum(values) / max(len(values), 1)

    kept: list[list[TextDelta]] = []
    for start in range(0, len(choices), of):
        kept += sorted(choices[start : start + of], key=mean, reverse=True)[:keep]
    return kept


def _message(events: list[MessageEvent]) -> dict[str, Any]:
    """A whole message of the same events. Without calls there is no `tool_calls`, not `[]`."""
    content = [event.text for event in events if isinstance(event, Content)]
    reasoning = "".join([event.text for event in events if isinstance(event, Reasoning)])
    calls: list[dict[str, Any]] = []
    for event in events:
        if isinstance(event, CallStart):
            function = {"name": event.name, "arguments": ""}
            calls.append({"id": event.call_id, "type": "function", "function": function})
        elif isinstance(event, CallArguments):
            calls[event.index]["function"]["arguments"] += event.text
    message: dict[str, Any] = {"role": "assistant"}
    message["content"] = "".join(content) if content else None
    message["refusal"] = None
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = calls
    return message


class Body(Protocol):
    """A response's body as it is written."""

    def write(self, data: bytes) -> bool:
        """False when `drain` should be awaited before the next."""

    async def drain(self) -> None:
        """Returns once more can be written."""


class _Stream:
    """A `Sink` that writes frames; `last` makes those behind the last choice."""

    def __init__(
        self, body: Body, choices: list[_Frames], last: Callable[[list[TextDelta]], bytes]
    ) -> None:
        self._body = body
        self._choices = choices
        self._last = last
        self._finished: list[TextDelta] = []

    def accept(self, index: int, delta: TextDelta) -> bool:
        frames = self._choices[index].of(delta)
        if delta.finish is not None:
            self._finished.append(delta)
            if len(self._finished) == len(self._choices):
                frames += self._last(self._finished)
        return not frames or self._body.write(frames)

    async def drain(self) -> None:
        await self._body.drain()


class Collector:
    """A `Sink` that keeps the deltas of each choice."""

    def __init__(self, choices: int) -> None:
        self.received: list[list[TextDelta]] = [[] for _ in range(choices)]

    def accept(self, index: int, delta: TextDelta) -> bool:
        self.received[index].append(delta)
        return True

    async def drain(self) -> None:
        pass


class Answer:
    """Frames the answer to one request; `model` is the name the client asked for.

    `choices` are numbered in the order of `generations`, prompt by prompt; a prompt's tokens are
    counted once however many choices it has.
    """

    def __init__(
        self,
        kind: Kind,
        model: str,
        batch: Batch,
        logprobs: Logprobs | None = None,
        *,
        token_ids: bool = False,
    ) -> None:
        self._kind = kind
        self._logprobs = logprobs
        self._shape = _SHAPES[kind]
        self._prompt_tokens = batch.prompt_tokens
        self._choices = batch.choices
        self._prompt_ids = [g.prompt_ids for g in batch.generations] if token_ids else None
        self._prompts = batch.prompts
        self._tokens_per_block = batch.tokens_per_block
        self._fingerprint = batch.fingerprint
        self._id = self._shape.id_prefix + batch.request_id
        self._created = int(time.time())
        self._model = model

    def stream(self, body: Body, *, include_usage: bool) -> Sink:
        """Writes SSE frames of all choices as they come, then usage when asked for."""
        head = self._head(self._shape.chunk_object)
        usage = b',"usage":null' if include_usage else b""
        choices = [
            _Frames(
                shape=self._shape,
                head=head,
                index=index,
                usage=usage,
                logprobs=self._logprobs,
                prompt_ids=self._prompt(index),
            )
            for index in range(self._choices)
        ]

        def last(finished: list[TextDelta]) -> bytes:
            if not include_usage:
                return b""
            total = orjson.dumps(self._usage(finished))
            return b"data: " + head + b',"choices":[],"usage":' + total + b"}\n\n"

        return _Stream(body, choices, last)

    def collected(self, received: list[list[TextDelta]], *, keep: int | None) -> bytes:
        """The whole answer as one JSON body, with the likeliest `keep` choices of each prompt.

        `received` are the deltas of each choice. Usage counts what was generated, kept or not, as
        at OpenAI.
        """
        usage = self._usage([own[-1] for own in received])
        if keep is not None:
            received = _likeliest(received, self._choices // self._prompts, keep)
        choices = [self._choice(index, own) for index, own in enumerate(received)]
        body = orjson.dumps({"choices": choices, "usage": usage})
        return self._head(self._shape.object) + b"," + body[1:]

    def _choice(self, index: int, deltas: list[TextDelta]) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": index}
        if self._kind == "completion":
            choice["text"] = "".join([delta.text for delta in deltas])
        elif deltas[-1].events is None:
            choice["message"] = _message([Content("".join([delta.text for delta in deltas]))])
        else:
            choice["message"] = _message([e for delta in deltas for e in delta.events or ()])
        logprobs = None
        if self._logprobs is not None:
            logprobs = self._logprobs([entry for delta in deltas for entry in delta.logprobs])
        if (prompt_ids := self._prompt(index)) is not None:
            choice["prompt_token_ids"] = prompt_ids
            choice["token_ids"] = [token_id for delta in deltas for token_id in delta.ids]
        return choice | {"logprobs": logprobs, "finish_reason": deltas[-1].finish}

    def _prompt(self, index: int) -> list[int] | None:
        """The token ids of a choice's prompt, if ids are wanted."""
        if self._prompt_ids is None:
            return None
        return self._prompt_ids[index * len(self._prompt_ids) // self._choices]

    def _head(self, object_name: str) -> bytes:
        """The object's first members, without its closing brace."""
        head = {
            "id": self._id,
            "object": object_name,
            "created": self._created,
            "model": self._model,
            "system_fingerprint": self._fingerprint,
        }
        return orjson.dumps(head)[:-1]

    def _usage(self, last: list[TextDelta]) -> dict[str, Any]:
        """Cached tokens are those of the prompts that were in the engine's KV cache before.

        The choices of one prompt share its cache, so the least cached choice counts.
        """
        completion = sum(delta.tokens for delta in last)
        reused = min(delta.reused_blocks for delta in last) * self._tokens_per_block
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": completion,
            "total_tokens": self._prompt_tokens + completion,
            "prompt_tokens_details": {"cached_tokens": min(reused, self._prompt_tokens)},
        }

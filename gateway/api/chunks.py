"""The chunks of a streamed choice, as SSE frames.

A frame is prefix + JSON string + suffix, all but the text prepared once per request (0.1 us a
frame, against 5 us for building a model object).
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import orjson

from gateway.api.custom_calls import ChatEvent, CustomCalls, CustomInput, CustomStart
from gateway.api.usage import build_usage
from gateway.deltas import TextDelta, TokenLogprob
from gateway.parsers.tools.events import CallStart, Content, Reasoning

Kind = Literal["chat", "completion"]
UsageFrames = Literal["none", "last", "each"]
"""Which frames of a stream tell the usage; where it is the last alone, all others have null."""
Logprobs = Callable[[list[TokenLogprob]], dict[str, Any]]
"""Writes log probabilities in the form of the endpoint."""
PromptLogprobs = Callable[[list[TokenLogprob]], list[dict[str, Any] | None]]
"""Writes those of a prompt."""

_NO_LOGPROBS = b',"logprobs":null'
_NULL_USAGE = b',"usage":null'
_END = b"}\n\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The bytes in which chat and completion objects differ. `%s` takes a JSON string."""

    id_prefix: str
    object: str
    chunk_object: str
    opening: bytes | None
    text: bytes
    closing: bytes


SHAPES: dict[Kind, Shape] = {
    "chat": Shape(
        id_prefix="chatcmpl-",
        object="chat.completion",
        chunk_object="chat.completion.chunk",
        opening=b'"delta":{"role":"assistant","content":""}',
        text=b'"delta":{"content":%s}',
        closing=b'"delta":{}',
    ),
    "completion": Shape(
        id_prefix="cmpl-",
        object="text_completion",
        chunk_object="text_completion",
        opening=None,
        text=b'"text":%s',
        closing=b'"text":""',
    ),
}


class Frames:
    """The fixed bytes around the text of one choice, made once per request."""

    def __init__(
        self,
        *,
        shape: Shape,
        head: bytes,
        index: int,
        usage: UsageFrames,
        logprobs: Logprobs | None,
        prompt_ids: list[int] | None,
        custom: Collection[str] = (),
    ) -> None:
        """`prompt_ids`, unless None, go with the first frame, and each frame's ids with it.

        `custom` are the names of custom tools.
        """
        self._custom = CustomCalls(custom)
        self._logprobs = logprobs
        self._pending: list[TokenLogprob] = []
        self._ids: list[int] | None = None if prompt_ids is None else []
        choice = b',"choices":[{"index":%d,' % index
        before = b"data: " + head + choice
        self._before_bytes = len(before)
        self._usage = b"" if usage == "none" else _NULL_USAGE
        self._closing = shape.closing
        text_before, self._text_after, self._after, self._plain_after = _split_template(
            shape.text, self._usage
        )
        self._text_before = before + text_before
        self._plain = logprobs is None and prompt_ids is None
        self._opening = b""
        if shape.opening:
            self._opening = before + shape.opening + _NO_LOGPROBS + self._after
        if prompt_ids is not None:
            # Where vLLM has them: in a completion's choice, but beside those of a chat.
            ids_member = b'"prompt_token_ids":' + orjson.dumps(prompt_ids)
            if shape.opening is None:
                self._opening = before + ids_member + b"," + shape.closing
            else:
                self._opening = b"data: " + head + b"," + ids_member + choice + shape.opening
            self._opening += _NO_LOGPROBS + self._after

    def encode(self, delta: TextDelta) -> bytes:
        """The frames of one delta: role once, text if any, the finish reason apart."""
        frames = self._opening
        if frames:
            self._opening = b""
        if not self._plain:
            self._pending += delta.logprobs
            if self._ids is not None:
                self._ids += delta.ids
        if delta.events is not None:
            events = self._custom.rewrite(delta.events)
            frames += b"".join([self._encode_event(event) for event in events])
        elif delta.text:
            after = self._plain_after
            if not self._plain:
                after = self._text_after + self._take_token_members() + self._after
            frames += self._text_before + orjson.dumps(delta.text) + after
        if delta.finish is not None:
            frames += self._before + self._closing + self._take_token_members()
            frames += b',"finish_reason":"' + delta.finish.encode()
            frames += b'","continued":true}]' if delta.continued else b'"}]'
            frames += self._usage + _END
        return frames

    @property
    def _before(self) -> bytes:
        """What every frame begins with: not kept twice, in each stream."""
        return self._text_before[: self._before_bytes]

    def _encode_event(self, event: ChatEvent) -> bytes:
        delta = orjson.dumps(_build_event_delta(event))
        return self._before + b'"delta":' + delta + self._take_token_members() + self._after

    def _take_token_members(self) -> bytes:
        """What is told of the tokens since the last frame; text may lag behind them."""
        ids = b""
        if self._ids:
            ids = b',"token_ids":' + orjson.dumps(self._ids)
            self._ids = []
        if self._logprobs is None or not self._pending:
            return ids + _NO_LOGPROBS
        entries, self._pending = self._pending, []
        return ids + b',"logprobs":' + orjson.dumps(self._logprobs(entries))


@lru_cache(maxsize=8)
def _split_template(text: bytes, usage: bytes) -> tuple[bytes, bytes, bytes, bytes]:
    """What is the same in all frames with a text: before it, behind it, and to the frame's end with
    log probabilities in between or without."""
    before, after = text.split(b"%s")
    end = b',"finish_reason":null}]' + usage + _END
    return before, after, end, after + _NO_LOGPROBS + end


class CountingFrames(Frames):
    """Each tells the usage so far, as vLLM's `continuous_usage_stats`: of all choices together."""

    def __init__(self, *, prompt_tokens: int, counts: list[int], index: int, **more: Any) -> None:
        """`counts`, which the request's frames share, has the tokens of each choice so far."""
        super().__init__(index=index, **more)
        self._prompt_tokens, self._counts, self._index = prompt_tokens, counts, index

    def encode(self, delta: TextDelta) -> bytes:
        self._counts[self._index] = delta.tokens
        completion = sum(self._counts)
        usage = build_usage(self._prompt_tokens, completion)
        # Only a frame ends so: within JSON's strings a line feed is written otherwise.
        usage_end = b',"usage":' + orjson.dumps(usage) + _END
        return super().encode(delta).replace(_NULL_USAGE + _END, usage_end)


def _build_event_delta(event: ChatEvent) -> dict[str, Any]:
    """A chunk's `delta`. Of a call, id, type and name come once: clients concatenate strings."""
    if isinstance(event, Content):
        return {"content": event.text}
    if isinstance(event, Reasoning):
        return {"reasoning_content": event.text}
    call: dict[str, Any] = {"index": event.index}
    if isinstance(event, CallStart):
        call |= {"id": event.call_id, "type": "function"}
        call["function"] = {"name": event.name, "arguments": ""}
    elif isinstance(event, CustomStart):
        call |= {"id": event.call_id, "type": "custom"}
        call["custom"] = {"name": event.name, "input": ""}
    elif isinstance(event, CustomInput):
        call["custom"] = {"input": event.text}
    else:
        call["function"] = {"arguments": event.text}
    return {"tool_calls": [call]}

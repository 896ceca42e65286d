"""Encoding of a streamed choice as SSE frames, each with one chunk object.

A frame is prefix + JSON string + suffix. The prefix and the suffix are prepared once per request,
so encoding a frame takes 0.1 us. Serializing a pydantic model for each frame would take 5 us.

See decision 053 in docs/decisions.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import orjson

from gateway.api.openai.custom_calls import ChatEvent, CustomCalls, CustomInput, CustomStart
from gateway.api.openai.usage import build_usage
from gateway.deltas import TextDelta, TokenLogprob
from gateway.parsers.tools.events import CallStart, Content, Reasoning

Kind = Literal["chat", "completion"]
UsageFrames = Literal["none", "last", "each"]
"""The frames of a stream that contain usage. With `last`, all other frames have `"usage": null`."""
Logprobs = Callable[[list[TokenLogprob]], dict[str, Any]]
"""Function that returns the `logprobs` member of a choice for a list of its tokens.

The format of the member depends on the endpoint.
"""
PromptLogprobs = Callable[[list[TokenLogprob]], list[dict[str, Any] | None]]
"""Function that returns the `prompt_logprobs` member for the tokens of a prompt."""

_NO_LOGPROBS = b',"logprobs":null'
_NULL_USAGE = b',"usage":null'
_END = b"}\n\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The names and JSON members that differ between chat answers and completion answers.

    Attributes:
        id_prefix: the beginning of an answer's `id`.
        object: the member `object` of a complete answer.
        chunk_object: the member `object` of a chunk.
        opening: the choice's member in the first chunk, which has no text; None to begin with text.
        text: the choice's member in a chunk with text; `%s` stands for the text as JSON string.
        closing: the choice's member in the chunk with the finish reason.
    """

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
    """Encoder of the deltas of one choice as SSE frames."""

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
        """Create the encoder.

        Args:
            shape: the parts that are specific to chats or to completions.
            head: the first members of each chunk as JSON, without the closing brace.
            index: the index of the choice.
            usage: the frames that carry usage.
            logprobs: function that formats log probabilities; None to send null.
            prompt_ids: the prompt's token ids, to send with the first frame. Each frame then also
                has the token ids of its text. None to send no token ids.
            custom: the names of the request's custom tools.
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
            # Write the ids where vLLM does: in the choice of a completion, beside `choices` in a
            # chat.
            ids_member = b'"prompt_token_ids":' + orjson.dumps(prompt_ids)
            if shape.opening is None:
                self._opening = before + ids_member + b"," + shape.closing
            else:
                self._opening = b"data: " + head + b"," + ids_member + choice + shape.opening
            self._opening += _NO_LOGPROBS + self._after

    def encode(self, delta: TextDelta) -> bytes:
        """Return the SSE frames for a delta; empty if there is nothing to send.

        The first call also returns the opening frame. In a chat, this frame has the role of the
        message. The finish reason is sent in a separate frame.
        """
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
        """The bytes with which every frame begins.

        `_text_before` begins with the same bytes. Storing them twice would cost memory for each
        stream.
        """
        return self._text_before[: self._before_bytes]

    def _encode_event(self, event: ChatEvent) -> bytes:
        delta = orjson.dumps(_build_event_delta(event))
        return self._before + b'"delta":' + delta + self._take_token_members() + self._after

    def _take_token_members(self) -> bytes:
        """Return the members with ids and log probabilities of the tokens since the last frame.

        Tokens are collected until the next frame is sent, because the text of a token may come in a
        later delta than the token.
        """
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
    """Return the bytes that are the same in all frames with text.

    Args:
        text: `Shape.text`, in which `%s` stands for the text as JSON string.
        usage: the member `usage` of these frames, or b"".

    Returns:
        Four byte strings. The first precedes the text. The second directly follows the text. The
            third ends the frame. The fourth is all that follows the text in a frame without log
            probabilities.
    """
    before, after = text.split(b"%s")
    end = b',"finish_reason":null}]' + usage + _END
    return before, after, end, after + _NO_LOGPROBS + end


class CountingFrames(Frames):
    """Frame encoder that adds the current usage to each frame (vLLM's `continuous_usage_stats`)."""

    def __init__(self, *, prompt_tokens: int, counts: list[int], index: int, **more: Any) -> None:
        """Create the encoder.

        All encoders of a request share the list `counts`: the number of tokens generated so far for
        each choice. `more` are the other arguments of `Frames`.
        """
        super().__init__(index=index, **more)
        self._prompt_tokens, self._counts, self._index = prompt_tokens, counts, index

    def encode(self, delta: TextDelta) -> bytes:
        self._counts[self._index] = delta.tokens
        completion = sum(self._counts)
        usage = build_usage(self._prompt_tokens, completion)
        # `replace` below finds the ends of frames only: JSON strings have no unescaped line feeds.
        usage_end = b',"usage":' + orjson.dumps(usage) + _END
        return super().encode(delta).replace(_NULL_USAGE + _END, usage_end)


def _build_event_delta(event: ChatEvent) -> dict[str, Any]:
    """Return the `delta` of a chunk for an event.

    The id, type and name of a call are sent only at its start: clients concatenate the strings of
    all chunks.
    """
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

"""Conversion of generated deltas to Anthropic's content blocks, as SSE events or one JSON body.

Reference: Anthropic API, "Streaming Messages" (2026), and the types of its Python package.
"""

from __future__ import annotations

from typing import Any

import orjson

from gateway.api.anthropic.error_envelope import build_envelope
from gateway.api.openai.answers import Body, build_continued
from gateway.api.openai.chunks import UsageFrames
from gateway.api.openai.usage import count_cached_tokens
from gateway.api.sse import WireFormat
from gateway.deltas import Sink, TextDelta
from gateway.generation.batch import Batch
from gateway.parsers.tools.events import (
    CallArguments,
    CallEnd,
    CallStart,
    Content,
    Event,
    Reasoning,
)

# The signature of all thinking blocks. Clients do not interpret a signature, but send it back with
# the thinking. Some clients drop a thinking block without a signature.
_SIGNATURE = "unsigned"
_PING = b'event: ping\ndata: {"type":"ping"}\n\n'

ANTHROPIC = WireFormat(
    done=b"",
    keep_alive=_PING,
    failure=lambda error: b"event: error\ndata: " + build_envelope(error) + b"\n\n",
)


def build_event(kind: str, **members: Any) -> bytes:
    """Encode an SSE event whose type is `kind`."""
    data = orjson.dumps({"type": kind, **members})
    return b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n"


class MessageAnswer:
    """Encoder of one request's answer in the format of the Messages API.

    `model` is the model name in the request, which the answer repeats.
    """

    def __init__(
        self, model: str, batch: Batch, *, max_tokens: int, omit_thinking: bool = False
    ) -> None:
        """Create the encoder.

        `max_tokens` is the limit in the client's request. The model's context may have space for
        fewer tokens. An answer that fills the context has the stop reason
        `model_context_window_exceeded`.
        """
        self._prompt_tokens = batch.prompt_tokens
        # `isolated_cache` is True if tenants do not trust each other. Then do not report the number
        # of cached tokens: it would show that another tenant has sent the same prompt.
        self._reports_cached = not batch.caller.isolated_cache
        self._is_shortened = batch.generations[0].max_tokens < max_tokens
        self._omit_thinking = omit_thinking
        self._head = {
            "id": f"msg_{batch.request_id}",
            "type": "message",
            "role": "assistant",
            "model": model,
        }

    def stream(self, body: Body, usage: UsageFrames) -> Sink:
        start: dict[str, Any] = self._head | {
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {"input_tokens": self._prompt_tokens, "output_tokens": 0},
        }
        return _EventSink(self, body, build_event("message_start", message=start) + _PING)

    def build_complete(self, received: list[list[TextDelta]], *, num_returned: int | None) -> bytes:
        (deltas,) = received
        blocks: list[tuple[dict[str, Any], list[str]]] = []
        calls = _CallBuffer()
        for event in [event for delta in deltas for event in calls.take(delta)]:
            if not blocks or begins_block(event, blocks[-1][0]["type"]):
                blocks.append((self.build_block(event), []))
            if (delta := self.build_delta(event)) is not None:
                blocks[-1][1].append(delta.popitem()[1])
        content = [_fill_block(block, "".join(texts)) for block, texts in blocks]
        ended = self.build_end(deltas[-1], called=calls.called)
        message = (
            self._head | {"content": content} | ended | {"usage": self.build_usage(deltas[-1])}
        )
        return orjson.dumps(message | build_continued(deltas[-1]))

    def count_logprobs(self, received: list[list[TextDelta]]) -> int:
        return 0

    def build_block(self, event: Event | Reasoning) -> dict[str, Any]:
        """Return the content block that an event opens, without the event's text."""
        if isinstance(event, CallStart):
            return {"type": "tool_use", "id": event.call_id, "name": event.name, "input": {}}
        if isinstance(event, Reasoning):
            return {"type": "thinking", "thinking": "", "signature": ""}
        return {"type": "text", "text": ""}

    def build_delta(self, event: Event | Reasoning) -> dict[str, Any] | None:
        """Return the `delta` with which an event extends its content block.

        Return None if the event adds nothing to the block.
        """
        if isinstance(event, Content):
            return {"type": "text_delta", "text": event.text}
        if isinstance(event, Reasoning):
            if self._omit_thinking:
                return None
            return {"type": "thinking_delta", "thinking": event.text}
        if isinstance(event, CallStart):
            return None
        return {"type": "input_json_delta", "partial_json": event.text}

    def build_end(self, last: TextDelta, *, called: bool) -> dict[str, Any]:
        """Return the members `stop_reason` and `stop_sequence`.

        The stop reason of a forced tool call is `tool_use`, too. OpenAI's API reports `stop` in
        this case.
        """
        reason = "end_turn"
        if last.finish == "length":
            reason = "model_context_window_exceeded" if self._is_shortened else "max_tokens"
        elif last.stop is not None:
            reason = "stop_sequence"
        elif called:
            reason = "tool_use"
        return {"stop_reason": reason, "stop_sequence": last.stop}

    def build_usage(self, last: TextDelta) -> dict[str, int]:
        """Return the member `usage` of a message.

        `input_tokens` does not count the prompt tokens that were read from the engine's KV cache.
        """
        cached = 0
        if self._reports_cached:
            cached = count_cached_tokens([last], self._prompt_tokens)
        return {
            "input_tokens": self._prompt_tokens - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": last.tokens,
        }


class _EventSink:
    """A `Sink` that writes a message as SSE events.

    `opening` contains the first SSE frames, which are written together with the first delta.
    """

    def __init__(self, answer: MessageAnswer, body: Body, opening: bytes) -> None:
        self._answer = answer
        self._body = body
        self._opening = opening
        self._index = -1
        self._type = ""
        self._calls = _CallBuffer()
        self._text = b""

    def accept(self, index: int, delta: TextDelta) -> bool:
        frames, self._opening = self._opening, b""
        if delta.events is None and self._text:
            # Fast path: text for an open text block.
            if delta.text:
                frames += self._text + orjson.dumps(delta.text) + b"}}\n\n"
        else:
            for event in self._calls.take(delta):
                frames += self._encode_event(event)
        if delta.finish is not None:
            ended = self._answer.build_end(delta, called=self._calls.called)
            frames += self._stop()
            more = {"usage": self._answer.build_usage(delta)} | build_continued(delta)
            frames += build_event("message_delta", delta=ended, **more)
            frames += build_event("message_stop")
        return not frames or self._body.write(frames)

    async def drain(self, by: float | None = None) -> None:
        await self._body.drain(by)

    def _encode_event(self, event: Event | Reasoning) -> bytes:
        frames = b""
        if not self._type or begins_block(event, self._type):
            frames = self._stop()
            block = self._answer.build_block(event)
            self._index, self._type = self._index + 1, block["type"]
            frames += build_event("content_block_start", index=self._index, content_block=block)
            self._text = b""
            if self._type == "text":
                template = build_event(
                    "content_block_delta", index=self._index, delta={"type": "text_delta"}
                )
                self._text = template.removesuffix(b"}}\n\n") + b',"text":'
        if (delta := self._answer.build_delta(event)) is not None:
            frames += build_event("content_block_delta", index=self._index, delta=delta)
        return frames

    def _stop(self) -> bytes:
        if not self._type:
            return b""
        frames = b""
        if self._type == "thinking":
            signed = {"type": "signature_delta", "signature": _SIGNATURE}
            frames = build_event("content_block_delta", index=self._index, delta=signed)
        return frames + build_event("content_block_stop", index=self._index)


def begins_block(event: Event | Reasoning, open_type: str) -> bool:
    """Return True if an event does not belong to the open block, so that a new block begins."""
    if isinstance(event, CallStart):
        return True
    if isinstance(event, Content):
        return open_type != "text"
    return isinstance(event, Reasoning) and open_type != "thinking"


class _CallBuffer:
    """A buffer that delays each tool call until its arguments are complete.

    A call whose arguments are a JSON object becomes a `tool_use` block. Any other call becomes
    plain text. Which of the two it becomes is known only at the call's end, and a block cannot be
    changed after it was sent. Clients wait for the complete input anyway.
    """

    def __init__(self) -> None:
        self.called = False
        """True if the last call is complete and valid."""
        self._text = False
        self._start: CallStart | None = None

    def take(self, delta: TextDelta) -> list[Event | Reasoning]:
        """Add the events of a delta, and return the events that can now be sent to the client.

        Text and reasoning are returned at once. The events of a tool call are returned at the
        call's end.
        """
        found: list[Event | Reasoning] = []
        for event in (Content(delta.text),) if delta.events is None else delta.events:
            if isinstance(event, CallStart):
                self._start = event
            elif isinstance(event, CallEnd):
                assert self._start is not None
                found += self._build_events(self._start, event)
            elif not isinstance(event, CallArguments) and event.text:
                self._text = isinstance(event, Content)
                found.append(event)
        return found

    def _build_events(self, start: CallStart, end: CallEnd) -> list[Event | Reasoning]:
        """Return the events to send at the end of a tool call.

        For a valid call, these are the call's start and its complete input. For an invalid call,
        this is the text of the call.
        """
        after_text, self._text = self._text, end.value is None
        self.called = end.value is not None
        if end.value is not None:
            return [start, CallArguments(start.index, end.value)]
        name = orjson.dumps(start.name).decode()
        brace = "" if end.state == "open" else "}"
        text = f'{{"name": {name}, "arguments": {end.arguments}{brace}'
        return [Content("\n" + text if after_text else text)]


def _fill_block(block: dict[str, Any], text: str) -> dict[str, Any]:
    if block["type"] == "tool_use":
        return block | {"input": orjson.Fragment(text)}
    if block["type"] == "thinking":
        return block | {"thinking": text, "signature": _SIGNATURE}
    return block | {"text": text}

"""The text deltas of a request's choices to OpenAI's objects: SSE frames or one JSON body.

Streamed or not differs only here.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

import orjson

from gateway.api.chunks import SHAPES, Frames, Kind, Logprobs
from gateway.deltas import Sink, TextDelta
from gateway.generation import Batch
from gateway.parsers.message import MessageEvent
from gateway.parsers.tools.events import CallArguments, CallStart, Content, Reasoning


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
        self, body: Body, choices: list[Frames], last: Callable[[list[TextDelta]], bytes]
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
        self._shape = SHAPES[kind]
        self._prompt_tokens = batch.prompt_tokens
        self._choices = batch.choices
        self._prompt_ids = [g.prompt_ids for g in batch.generations] if token_ids else None
        self._prompts = batch.prompts
        self._tokens_per_block = batch.tokens_per_block
        self._tells_cached = not batch.caller.apart
        self._fingerprint = batch.fingerprint
        self._id = self._shape.id_prefix + batch.request_id
        self._created = int(time.time())
        self._model = model

    def stream(self, body: Body, *, include_usage: bool) -> Sink:
        """Writes SSE frames of all choices as they come, then usage when asked for."""
        head = self._head(self._shape.chunk_object)
        usage = b',"usage":null' if include_usage else b""
        choices = [
            Frames(
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
        usage: dict[str, Any] = {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": completion,
            "total_tokens": self._prompt_tokens + completion,
        }
        if self._tells_cached:
            reused = min(delta.reused_blocks for delta in last) * self._tokens_per_block
            cached = min(reused, self._prompt_tokens)
            usage["prompt_tokens_details"] = {"cached_tokens": cached}
        return usage

"""The text deltas of a request's choices to OpenAI's objects: SSE frames or one JSON body.

Streamed or not differs only here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import orjson

from gateway.api.chunks import (
    SHAPES,
    CountingFrames,
    Frames,
    Kind,
    Logprobs,
    PromptLogprobs,
    UsageFrames,
)
from gateway.api.custom_calls import ChatEvent, CustomCalls, CustomInput, CustomStart
from gateway.api.usage import final_usage
from gateway.deltas import Sink, TextDelta
from gateway.generation import Batch
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


def _message(events: Sequence[ChatEvent]) -> dict[str, Any]:
    """Return the message of the same events; one without calls has no `tool_calls`."""
    content = [event.text for event in events if isinstance(event, Content)]
    reasoning = "".join([event.text for event in events if isinstance(event, Reasoning)])
    calls: list[dict[str, Any]] = []
    for event in events:
        if isinstance(event, CallStart):
            function = {"name": event.name, "arguments": ""}
            calls.append({"id": event.call_id, "type": "function", "function": function})
        elif isinstance(event, CallArguments):
            calls[event.index]["function"]["arguments"] += event.text
        elif isinstance(event, CustomStart):
            tool = {"name": event.name, "input": ""}
            calls.append({"id": event.call_id, "type": "custom", "custom": tool})
        elif isinstance(event, CustomInput):
            calls[event.index]["custom"]["input"] = event.text
    message: dict[str, Any] = {"role": "assistant"}
    message["content"] = "".join(content) if content else None
    message["refusal"] = None
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = calls
    return message


def continued(last: TextDelta) -> dict[str, bool]:
    """What marks an answer, or a choice, that two replicas have sampled; nothing of others."""
    return {"continued": True} if last.continued else {}


class Body(Protocol):
    """A response's body as it is written."""

    def write(self, data: bytes) -> bool:
        """False when `drain` should be awaited before the next."""

    async def drain(self, by: float | None = None) -> None:
        """Returns once more can be written. Raises TimeoutError as `Sink.drain`."""


class _Stream:
    """A `Sink` that writes frames.

    `answer` is asked for the frames of a choice with its first delta: by then it is known which
    model answers.
    """

    def __init__(self, answer: Answer, body: Body, choices: int, usage: UsageFrames) -> None:
        self._answer = answer
        self._body = body
        self._count = choices
        self._usage: UsageFrames = usage
        self._choices: list[Frames | None] = [None] * choices
        self._finished: list[TextDelta] = []

    def accept(self, index: int, delta: TextDelta) -> bool:
        choice = self._choices[index]
        if choice is None:
            choice = self._choices[index] = self._answer.frames(index, self._usage)
        frames = choice.of(delta)
        if delta.finish is not None:
            self._finished.append(delta)
            if len(self._finished) == self._count:
                frames += self._answer.usage_frame(self._finished, self._usage)
        return not frames or self._body.write(frames)

    async def drain(self, by: float | None = None) -> None:
        await self._body.drain(by)


class Collector:
    """A `Sink` that keeps the deltas of each choice."""

    def __init__(self, choices: int) -> None:
        self.received: list[list[TextDelta]] = [[] for _ in range(choices)]

    def accept(self, index: int, delta: TextDelta) -> bool:
        self.received[index].append(delta)
        return True

    async def drain(self, by: float | None = None) -> None:
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
        prompt_logprobs: PromptLogprobs | None = None,
        token_ids: bool = False,
        echo: str = "",
        custom: Collection[str] = (),
    ) -> None:
        """`echo` is what the message of a chat begins with, `custom` are names of custom tools."""
        self._custom = custom
        self._kind = kind
        self._logprobs = logprobs
        self._shape = SHAPES[kind]
        self._echo: Sequence[Content] = [Content(echo)] if echo else ()
        if echo:
            opening = b'"delta":{"role":"assistant","content":' + orjson.dumps(echo) + b"}"
            self._shape = replace(self._shape, opening=opening)
        self._prompt_logprobs = prompt_logprobs
        self._scored = batch.prompt_logprobs
        self._prompt_tokens = batch.prompt_tokens
        self._choices = batch.choices
        self._prompts = batch.prompts
        # The generations of one prompt.
        self._each = len(batch.generations) // batch.prompts
        first = batch.generations[:: self._each]
        self._prompt_ids = [g.prompt_ids.tolist() for g in first] if token_ids else None
        # Who is kept apart is not told what others' prompts have left in the cache.
        self._tells_cached = not batch.caller.isolated_cache
        self._fingerprint_of = batch.fingerprint_of
        self._id = self._shape.id_prefix + batch.request_id
        self._created = int(time.time())
        self._model = model

    def stream(self, body: Body, usage: UsageFrames) -> Sink:
        """Writes SSE frames of all choices as they come, then usage when asked for."""
        self._counts = [0] * self._choices if usage == "each" else []
        return _Stream(self, body, self._choices, usage)

    def frames(self, index: int, usage: UsageFrames) -> Frames:
        """Those of one choice."""
        ids = self._prompt_ids
        kind: Callable[..., Frames] = Frames
        if usage == "each":
            kind = partial(CountingFrames, prompt_tokens=self._prompt_tokens, counts=self._counts)
        return kind(
            shape=self._shape,
            head=self._head(self._shape.chunk_object, index),
            index=index,
            usage=usage,
            logprobs=self._logprobs,
            prompt_ids=ids[index * self._prompts // self._choices] if ids else None,
            custom=self._custom,
        )

    def usage_frame(self, finished: list[TextDelta], usage: UsageFrames) -> bytes:
        """What comes behind the last choice, if anything does."""
        if usage == "none":
            return b""
        total = orjson.dumps(self._usage(finished))
        head = self._head(self._shape.chunk_object)
        return b"data: " + head + b',"choices":[],"usage":' + total + b"}\n\n"

    def collected(self, received: list[list[TextDelta]], *, keep: int | None) -> bytes:
        """The whole answer as one JSON body, with the likeliest `keep` choices of each prompt.

        `received` are the deltas of each choice. Usage counts what was generated, kept or not, as
        at OpenAI.
        """
        usage = self._usage([own[-1] for own in received])
        if keep is not None:
            received = _likeliest(received, self._choices // self._prompts, keep)
        each = len(received) // self._prompts
        choices = [self._choice(i, i // each, own) for i, own in enumerate(received)]
        answer: dict[str, Any] = {"choices": choices, "usage": usage}
        if self._kind == "chat":
            answer |= self._of_prompt(0)
        return self._head(self._shape.object) + b"," + orjson.dumps(answer)[1:]

    def log_probabilities(self, received: list[list[TextDelta]]) -> int:
        """Of how many tokens `collected` has some to write; each with 20 alternatives is 50 us."""
        told = 0
        if self._logprobs is not None:
            told += sum(len(delta.logprobs) for deltas in received for delta in deltas)
        if self._prompt_logprobs is not None:
            told += sum(map(len, self._scored.values()))
        return told

    def _usage(self, finished: list[TextDelta]) -> dict[str, Any]:
        return final_usage(
            finished, prompt_tokens=self._prompt_tokens, tells_cached=self._tells_cached
        )

    def _choice(self, index: int, prompt: int, deltas: list[TextDelta]) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": index}
        if self._kind == "completion":
            choice["text"] = "".join([delta.text for delta in deltas])
            choice |= self._of_prompt(prompt)
        elif deltas[-1].events is None:
            text = Content("".join([delta.text for delta in deltas]))
            choice["message"] = _message([*self._echo, text])
        else:
            events = [event for delta in deltas for event in delta.events or ()]
            choice["message"] = _message([*self._echo, *CustomCalls(self._custom).rewrite(events)])
        logprobs = None
        if self._logprobs is not None:
            logprobs = self._logprobs([entry for delta in deltas for entry in delta.logprobs])
        if self._prompt_ids is not None:
            choice["token_ids"] = [token_id for delta in deltas for token_id in delta.ids]
        choice |= {"logprobs": logprobs, "finish_reason": deltas[-1].finish}
        return choice | continued(deltas[-1])

    def _of_prompt(self, prompt: int) -> dict[str, Any]:
        """What is wanted of a prompt; vLLM has it beside the choices of a chat, else in them."""
        told: dict[str, Any] = {}
        if self._prompt_ids is not None:
            told["prompt_token_ids"] = self._prompt_ids[prompt]
        if self._prompt_logprobs is not None:
            told["prompt_logprobs"] = self._prompt_logprobs(self._scored[prompt * self._each])
        return told

    def _head(self, object_name: str, choice: int = 0) -> bytes:
        """The object's first members, without its closing brace; of several choices, `choice`'s."""
        head = {
            "id": self._id,
            "object": object_name,
            "created": self._created,
            "model": self._model,
            "system_fingerprint": self._fingerprint_of(choice),
        }
        return orjson.dumps(head)[:-1]

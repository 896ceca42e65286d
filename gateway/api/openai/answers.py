"""Conversion of text deltas to OpenAI's answers: SSE frames, or one JSON body.

All steps before this conversion are the same for streaming and non-streaming requests.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import orjson

from gateway.api.openai.chunks import (
    SHAPES,
    CountingFrames,
    Frames,
    Kind,
    Logprobs,
    PromptLogprobs,
    UsageFrames,
)
from gateway.api.openai.custom_calls import ChatEvent, CustomCalls, CustomInput, CustomStart
from gateway.api.openai.usage import build_final_usage
from gateway.deltas import Sink, TextDelta
from gateway.generation.batch import Batch
from gateway.parsers.tools.events import CallArguments, CallStart, Content, Reasoning


def _select_likeliest(
    choices: list[list[TextDelta]], of: int, num_returned: int
) -> list[list[TextDelta]]:
    """Return the likeliest choices of each prompt, for `best_of`.

    These are the choices whose tokens have the highest mean log probability.

    Args:
        choices: the deltas of each choice. The choices of a prompt follow each other.
        of: the number of choices that were generated for each prompt.
        num_returned: the number of choices to return for each prompt.
    """

    def mean(deltas: list[TextDelta]) -> float:
        # Skip the echoed prompt, which is the same for all choices. Its delta has 0 tokens.
        own = [entry for delta in deltas if delta.tokens for entry in delta.logprobs]
        values = [entry.logprob for entry in own if entry.logprob is not None]
        return sum(values) / max(len(values), 1)

    selected: list[list[TextDelta]] = []
    for start in range(0, len(choices), of):
        selected += sorted(choices[start : start + of], key=mean, reverse=True)[:num_returned]
    return selected


def _build_message(events: Sequence[ChatEvent]) -> dict[str, Any]:
    """Build the `message` of a chat choice from the choice's events."""
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


def build_continued(last: TextDelta) -> dict[str, bool]:
    """Return the member `continued` of a choice as a dict; {} for most choices.

    The member marks a choice that one replica began and a second replica continued with a different
    seed.
    """
    return {"continued": True} if last.continued else {}


class Body(Protocol):
    """A response body that can be written to."""

    def write(self, data: bytes) -> bool:
        """Write data; return False if `drain` should be awaited before the next write."""

    async def drain(self, by: float | None = None) -> None:
        """Wait until more data can be written.

        Raise TimeoutError if the wait lasts until the event loop's clock reaches `by`, in seconds.
        """


class _FrameSink:
    """A `Sink` that writes deltas to a response body as SSE frames.

    The frame encoder of a choice is created at the choice's first delta. Only then is it known
    which replica generates the choice, and so which `system_fingerprint` the frames must have.
    """

    def __init__(self, answer: OpenAIAnswer, body: Body, choices: int, usage: UsageFrames) -> None:
        self._answer = answer
        self._body = body
        self._count = choices
        self._usage: UsageFrames = usage
        self._choices: list[Frames | None] = [None] * choices
        self._finished: list[TextDelta] = []

    def accept(self, index: int, delta: TextDelta) -> bool:
        choice = self._choices[index]
        if choice is None:
            choice = self._choices[index] = self._answer.make_frames(index, self._usage)
        frames = choice.encode(delta)
        if delta.finish is not None:
            self._finished.append(delta)
            if len(self._finished) == self._count:
                frames += self._answer.build_usage_frame(self._finished, self._usage)
        return not frames or self._body.write(frames)

    async def drain(self, by: float | None = None) -> None:
        await self._body.drain(by)


class DeltaCollector:
    """A `Sink` that collects the deltas of each choice in `received`, for a complete response."""

    def __init__(self, choices: int) -> None:
        self.received: list[list[TextDelta]] = [[] for _ in range(choices)]

    def accept(self, index: int, delta: TextDelta) -> bool:
        self.received[index].append(delta)
        return True

    async def drain(self, by: float | None = None) -> None:
        pass


class OpenAIAnswer:
    """Encoder of the answer to a chat or completion request.

    Choices are numbered in the order of `batch.generations`: first all choices of the first prompt.
    `usage` counts the tokens of a prompt once, not for each of its choices.
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
        """Create the encoder.

        Args:
            kind: the endpoint, chat or completion.
            model: the model name in the request, which the answer repeats.
            batch: the generations of the request.
            logprobs: function that formats log probabilities; None to include none.
            prompt_logprobs: function that formats the log probabilities of a prompt; None to
                include none.
            token_ids: include the token ids of prompts and choices.
            echo: text to write before the generated text of a chat message.
            custom: the names of the request's custom tools.
        """
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
        # Number of generations of each prompt.
        self._each = len(batch.generations) // batch.prompts
        first = batch.generations[:: self._each]
        self._prompt_ids = [g.prompt_ids.tolist() for g in first] if token_ids else None
        # `isolated_cache` is True if tenants do not trust each other. Then do not report the number
        # of cached tokens: it would show that another tenant has sent the same prompt.
        self._reports_cached = not batch.caller.isolated_cache
        self._fingerprint_of = batch.fingerprint_of
        self._id = self._shape.id_prefix + batch.request_id
        self._created = int(time.time())
        self._model = model

    def stream(self, body: Body, usage: UsageFrames) -> Sink:
        """Return a sink that writes SSE frames to `body`.

        `usage` selects the frames that contain the member `usage`: see `UsageFrames`.
        """
        self._counts = [0] * self._choices if usage == "each" else []
        return _FrameSink(self, body, self._choices, usage)

    def make_frames(self, index: int, usage: UsageFrames) -> Frames:
        """Return a frame encoder for the choice `index`."""
        ids = self._prompt_ids
        kind: Callable[..., Frames] = Frames
        if usage == "each":
            kind = partial(CountingFrames, prompt_tokens=self._prompt_tokens, counts=self._counts)
        return kind(
            shape=self._shape,
            head=self._build_head(self._shape.chunk_object, index),
            index=index,
            usage=usage,
            logprobs=self._logprobs,
            prompt_ids=ids[index * self._prompts // self._choices] if ids else None,
            custom=self._custom,
        )

    def build_usage_frame(self, finished: list[TextDelta], usage: UsageFrames) -> bytes:
        """Return the frame with the usage of all choices; empty if `usage` is `none`."""
        if usage == "none":
            return b""
        total = orjson.dumps(self._build_usage(finished))
        head = self._build_head(self._shape.chunk_object)
        return b"data: " + head + b',"choices":[],"usage":' + total + b"}\n\n"

    def build_complete(self, received: list[list[TextDelta]], *, num_returned: int | None) -> bytes:
        """Return the complete answer as JSON.

        The member `usage` counts the tokens of all generated choices, as at OpenAI. This includes
        the choices that are not returned.

        Args:
            received: the deltas of each choice.
            num_returned: the number of choices to return for each prompt. The likeliest choices are
                returned. None to return all choices.
        """
        usage = self._build_usage([own[-1] for own in received])
        if num_returned is not None:
            received = _select_likeliest(received, self._choices // self._prompts, num_returned)
        each = len(received) // self._prompts
        choices = [self._build_choice(i, i // each, own) for i, own in enumerate(received)]
        answer: dict[str, Any] = {"choices": choices, "usage": usage}
        if self._kind == "chat":
            answer |= self._build_prompt_fields(0)
        return self._build_head(self._shape.object) + b"," + orjson.dumps(answer)[1:]

    def count_logprobs(self, received: list[list[TextDelta]]) -> int:
        """Return the number of tokens whose log probabilities `build_complete` would write."""
        count = 0
        if self._logprobs is not None:
            count += sum(len(delta.logprobs) for deltas in received for delta in deltas)
        if self._prompt_logprobs is not None:
            count += sum(map(len, self._scored.values()))
        return count

    def _build_usage(self, finished: list[TextDelta]) -> dict[str, Any]:
        return build_final_usage(
            finished, prompt_tokens=self._prompt_tokens, reports_cached=self._reports_cached
        )

    def _build_choice(self, index: int, prompt: int, deltas: list[TextDelta]) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": index}
        if self._kind == "completion":
            choice["text"] = "".join([delta.text for delta in deltas])
            choice |= self._build_prompt_fields(prompt)
        elif deltas[-1].events is None:
            text = Content("".join([delta.text for delta in deltas]))
            choice["message"] = _build_message([*self._echo, text])
        else:
            events = [event for delta in deltas for event in delta.events or ()]
            choice["message"] = _build_message(
                [*self._echo, *CustomCalls(self._custom).rewrite(events)]
            )
        logprobs = None
        if self._logprobs is not None:
            logprobs = self._logprobs([entry for delta in deltas for entry in delta.logprobs])
        if self._prompt_ids is not None:
            choice["token_ids"] = [token_id for delta in deltas for token_id in delta.ids]
        choice |= {"logprobs": logprobs, "finish_reason": deltas[-1].finish}
        return choice | build_continued(deltas[-1])

    def _build_prompt_fields(self, prompt: int) -> dict[str, Any]:
        """Return vLLM's members for the token ids and log probabilities of a prompt.

        A chat completion has these members beside `choices`. A text completion has them in each
        choice.
        """
        fields: dict[str, Any] = {}
        if self._prompt_ids is not None:
            fields["prompt_token_ids"] = self._prompt_ids[prompt]
        if self._prompt_logprobs is not None:
            fields["prompt_logprobs"] = self._prompt_logprobs(self._scored[prompt * self._each])
        return fields

    def _build_head(self, object_name: str, choice: int = 0) -> bytes:
        """Return the first members of the answer or chunk as JSON, without the closing brace.

        `choice` is the index of a choice. The member `system_fingerprint` identifies the model of
        the replica that generates this choice.
        """
        head = {
            "id": self._id,
            "object": object_name,
            "created": self._created,
            "model": self._model,
            "system_fingerprint": self._fingerprint_of(choice),
        }
        return orjson.dumps(head)[:-1]

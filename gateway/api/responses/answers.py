"""The deltas of a chat to a response: events of a stream, or one JSON body.

Reference: OpenAI API, "Create a model response" and "Streaming events" (2026), and the types of its
Python package.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any, cast

import orjson

from gateway.api import failures
from gateway.api.answers import Body
from gateway.api.chunks import UsageFrames
from gateway.api.failures import Failure, status_of
from gateway.api.logprobs import chat_logprobs
from gateway.api.responses.events import Stream
from gateway.api.responses.output import Form, Output, ended
from gateway.api.responses.requests import Chat, ResponseRequest
from gateway.api.sse import OPENAI, Wire
from gateway.api.usage import cached_tokens
from gateway.deltas import Sink, TextDelta, TokenLogprob
from gateway.generation import Batch
from gateway.tokenization.prompts import Prompts


class ResponseAnswer:
    """Writes the answer to one request."""

    def __init__(self, prompts: Prompts, chat: Chat, batch: Batch) -> None:
        asked = cast(ResponseRequest, chat.asked)
        self._batch = batch
        self._head = {
            "id": f"resp_{batch.request_id}",
            "object": "response",
            "created_at": int(time.time()),
        }
        # What a client has said is told in three events: written once.
        self._tail = orjson.dumps(_echo(asked))[1:]
        self.form = Form(
            ids=batch.request_id,
            custom=asked.custom_tools,
            summarized=asked.summarized,
            encoded=asked.includes("reasoning.encrypted_content"),
            logprobs=partial(_logprobs, prompts) if chat.logprobs else None,
        )
        self._stream: Stream | None = None

    def stream(self, body: Body, usage: UsageFrames) -> Sink:
        self._stream = Stream(self, body)
        return self._stream

    def collected(self, received: list[list[TextDelta]], *, keep: int | None) -> bytes:
        (deltas,) = received
        output = Output(self.form)
        for delta in deltas:
            output.take(delta)
        return self.finished(deltas[-1], output)

    def log_probabilities(self, received: list[list[TextDelta]]) -> int:
        if self.form.logprobs is None:
            return 0
        return sum(len(delta.logprobs) for deltas in received for delta in deltas)

    def wire(self) -> Wire:
        """What its stream has besides the events of an answer."""
        return Wire(done=b"", patience=OPENAI.patience, failure=self._failed)

    def finished(self, last: TextDelta, output: Output) -> bytes:
        """The response object, which has come to its end."""
        cut = last.finish == "length"
        return self.response(
            "incomplete" if cut else "completed",
            output=ended(output.items, cut=cut),
            usage=self._usage(last, output),
            incomplete_details={"reason": "max_output_tokens"} if cut else None,
        )

    def response(self, status: str, **members: Any) -> bytes:
        """The response object."""
        told: dict[str, Any] = self._head | {
            "status": status,
            "completed_at": int(time.time()) if status == "completed" else None,
            "error": None,
            "incomplete_details": None,
            "output": [],
            "usage": None,
        }
        return orjson.dumps(told | members)[:-1] + b"," + self._tail

    def _usage(self, last: TextDelta, output: Output) -> dict[str, Any]:
        cached, prompt_tokens = 0, self._batch.prompt_tokens
        # Who is kept apart is not told what others' prompts have left in the cache.
        if not self._batch.caller.apart:
            cached = cached_tokens([last], prompt_tokens)
        return {
            "input_tokens": prompt_tokens,
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
            "output_tokens": last.tokens,
            "output_tokens_details": {"reasoning_tokens": output.reasoning_tokens},
            "total_tokens": prompt_tokens + last.tokens,
        }

    def _failed(self, error: Failure) -> bytes:
        stream = self._stream or Stream(self, None)
        status = status_of(error)
        code = "server_error" if status >= 500 else "invalid_prompt"
        if status == 429:
            code = "rate_limit_exceeded"
        told = {"code": code, "message": failures.message(error)}
        return stream.failed(told, failures.envelope(error))


def _logprobs(prompts: Prompts, entries: list[TokenLogprob]) -> list[dict[str, Any]]:
    content: list[dict[str, Any]] = chat_logprobs(entries, prompts, as_ids=False)["content"]
    return content


def _echo(asked: ResponseRequest) -> dict[str, Any]:
    """What the request has said, as OpenAI tells it again, with the defaults."""
    reasoning, text = asked.reasoning, asked.text
    form: Any = {"type": "text"}
    if text is not None and text.format is not None:
        form = text.format.model_dump(by_alias=True, exclude_none=True)
    choice: Any = asked.tool_choice or "auto"
    return {
        "model": asked.model,
        "background": False,
        "conversation": None,
        "instructions": asked.instructions,
        "max_output_tokens": asked.max_output_tokens,
        "max_tool_calls": asked.max_tool_calls,
        "metadata": asked.metadata or {},
        "parallel_tool_calls": asked.parallel_tool_calls is not False,
        "previous_response_id": asked.previous_response_id,
        "prompt_cache_key": asked.prompt_cache_key,
        "prompt_cache_retention": asked.prompt_cache_retention,
        "reasoning": {
            "effort": reasoning and reasoning.effort,
            "summary": reasoning and (reasoning.summary or reasoning.generate_summary),
        },
        "safety_identifier": asked.safety_identifier,
        "service_tier": "default",
        "store": False,
        "temperature": 1.0 if asked.temperature is None else asked.temperature,
        "text": {"format": form, "verbosity": (text and text.verbosity) or "medium"},
        "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
        "tools": [tool.model_dump() for tool in asked.tools or ()],
        "top_logprobs": asked.top_logprobs or 0,
        "top_p": 1.0 if asked.top_p is None else asked.top_p,
        "truncation": asked.truncation or "disabled",
        "user": asked.user,
    }

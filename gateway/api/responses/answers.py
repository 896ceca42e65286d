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
from gateway.api.answers import Body, build_continued
from gateway.api.chunks import UsageFrames
from gateway.api.failures import Failure, status_of
from gateway.api.logprobs import build_chat_logprobs
from gateway.api.responses.chats import Chat
from gateway.api.responses.events import Stream
from gateway.api.responses.output import Form, Output, build_items
from gateway.api.responses.requests import ResponseRequest
from gateway.api.sse import OPENAI, WireFormat
from gateway.api.usage import count_cached_tokens
from gateway.deltas import Sink, TextDelta, TokenLogprob
from gateway.generation import Batch
from gateway.tokenization.prompts import Prompts


class ResponseAnswer:
    """Writes the answer to one request."""

    def __init__(
        self,
        prompts: Prompts,
        chat: Chat,
        batch: Batch,
        *,
        stored: bool = False,
        held: bool = False,
    ) -> None:
        """`held` has the stream keep its last event back, until somebody has kept the response."""
        asked = cast(ResponseRequest, chat.asked)
        self._batch = batch
        conversation = asked.conversation_id
        self._head: dict[str, Any] = {
            "id": f"resp_{batch.request_id}",
            "object": "response",
            "created_at": int(time.time()),
            "background": bool(asked.background),
            "conversation": conversation and {"id": conversation},
            "previous_response_id": asked.previous_response_id,
            "store": stored,
        }
        # What the client has said is told in three events: written once.
        self._tail = chat.told[1:]
        self.form = Form(
            ids=batch.request_id,
            calls=chat.called_tools,
            summarized=asked.summarized,
            encoded=asked.includes("reasoning.encrypted_content"),
            logprobs=partial(_logprobs, prompts) if chat.logprobs else None,
        )
        self.holds = held
        self._stream: Stream | None = None

    def stream(self, body: Body, usage: UsageFrames) -> Sink:
        self._stream = Stream(self, body)
        return self._stream

    def build_complete(self, received: list[list[TextDelta]], *, num_returned: int | None) -> bytes:
        (deltas,) = received
        output = Output(self.form)
        for delta in deltas:
            output.take(delta)
        return self.finished(deltas[-1], output)

    def count_logprobs(self, received: list[list[TextDelta]]) -> int:
        if self.form.logprobs is None:
            return 0
        return sum(len(delta.logprobs) for deltas in received for delta in deltas)

    @property
    def id(self) -> str:
        return str(self._head["id"])

    @property
    def held(self) -> tuple[bytes, bytes]:
        """The response object that a stream has ended with, and the event that tells so."""
        assert self._stream is not None
        return self._stream.response, self._stream.last

    def queued(self) -> bytes:
        """What the stream begins with in the background."""
        assert self._stream is not None
        return self._stream.queued()

    def wire(self) -> WireFormat:
        """What its stream has besides the events of an answer."""
        return WireFormat(done=b"", keep_alive=OPENAI.keep_alive, failure=self._failed)

    def finished(self, last: TextDelta, output: Output) -> bytes:
        """The response object, which has come to its end."""
        cut = output.is_cut(last)
        # OpenAI's schema has no reason for an answer that ended within a call.
        limited = last.finish == "length"
        return self.response(
            "incomplete" if cut else "completed",
            output=build_items(output.items, cut=cut),
            usage=self._usage(last, output),
            incomplete_details={"reason": "max_output_tokens"} if limited else None,
            **build_continued(last),
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
        if not self._batch.caller.isolated_cache:
            cached = count_cached_tokens([last], prompt_tokens)
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
        told = {"code": code, "message": failures.build_message(error)}
        return stream.failed(told, failures.build_envelope(error))


def _logprobs(prompts: Prompts, entries: list[TokenLogprob]) -> list[dict[str, Any]]:
    content: list[dict[str, Any]] = build_chat_logprobs(entries, prompts, as_ids=False)["content"]
    return content

"""Conversion of generated deltas to a response of the Responses API: SSE events, or one JSON body.

Reference: OpenAI API, "Create a model response" and "Streaming events" (2026), and the types of its
Python package.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any, cast

import orjson

from gateway.api import failures
from gateway.api.failures import Failure, status_of
from gateway.api.openai.answers import Body, build_continued
from gateway.api.openai.chunks import UsageFrames
from gateway.api.openai.logprobs import build_chat_logprobs
from gateway.api.openai.usage import count_cached_tokens
from gateway.api.responses.chats import ResponsesChat
from gateway.api.responses.events import ResponseEventStream
from gateway.api.responses.output import Form, Output, build_items
from gateway.api.responses.requests import ResponseRequest
from gateway.api.sse import OPENAI, WireFormat
from gateway.deltas import Sink, TextDelta, TokenLogprob
from gateway.generation.batch import Batch
from gateway.tokenization.prompts import Prompts


class ResponseAnswer:
    """Encoder of one request's answer in the format of the Responses API."""

    def __init__(
        self,
        prompts: Prompts,
        chat: ResponsesChat,
        batch: Batch,
        *,
        stored: bool = False,
        hold_last_event: bool = False,
    ) -> None:
        """Create the encoder.

        If `hold_last_event` is True, a stream does not write its last event. The caller first
        stores the response, and then writes this event.
        """
        original = cast(ResponseRequest, chat.original)
        self._batch = batch
        conversation = original.conversation_id
        self._head: dict[str, Any] = {
            "id": f"resp_{batch.request_id}",
            "object": "response",
            "created_at": int(time.time()),
            "background": bool(original.background),
            "conversation": conversation and {"id": conversation},
            "previous_response_id": original.previous_response_id,
            "store": stored,
        }
        # Store the request's fields already serialized, because three events repeat them.
        self._tail = chat.echoed_fields[1:]
        self.form = Form(
            ids=batch.request_id,
            calls=chat.called_tools,
            with_summary=original.wants_summary,
            with_encrypted=original.includes("reasoning.encrypted_content"),
            logprobs=partial(_logprobs, prompts) if chat.logprobs else None,
        )
        self.holds_last_event = hold_last_event
        self._stream: ResponseEventStream | None = None

    def stream(self, body: Body, usage: UsageFrames) -> Sink:
        self._stream = ResponseEventStream(self, body)
        return self._stream

    def build_complete(self, received: list[list[TextDelta]], *, num_returned: int | None) -> bytes:
        (deltas,) = received
        output = Output(self.form)
        for delta in deltas:
            output.take(delta)
        return self.build_finished(deltas[-1], output)

    def count_logprobs(self, received: list[list[TextDelta]]) -> int:
        if self.form.logprobs is None:
            return 0
        return sum(len(delta.logprobs) for deltas in received for delta in deltas)

    @property
    def id(self) -> str:
        return str(self._head["id"])

    @property
    def final_response_and_event(self) -> tuple[bytes, bytes]:
        """The response object at the end of the stream, and the withheld event that contains it."""
        assert self._stream is not None
        return self._stream.response, self._stream.last_event

    def build_queued_events(self) -> bytes:
        """Return the events `response.created` and `response.queued` of a background response."""
        assert self._stream is not None
        return self._stream.build_queued_events()

    def wire(self) -> WireFormat:
        """Return the frames that the stream sends in addition to the answer's events.

        These are keep-alive comments and the events of a failed answer. No frame follows the last
        event.
        """
        return WireFormat(done=b"", keep_alive=OPENAI.keep_alive, failure=self._frame_failure)

    def build_finished(self, last: TextDelta, output: Output) -> bytes:
        """Return the response object of a complete or truncated answer, as JSON."""
        cut = output.is_cut(last)
        # The answer may have ended within a tool call although no limit was reached.
        # `incomplete_details` is then null, because OpenAI's schema defines no reason for this
        # case.
        limited = last.finish == "length"
        return self.build_response(
            "incomplete" if cut else "completed",
            output=build_items(output.items, cut=cut),
            usage=self._usage(last, output),
            incomplete_details={"reason": "max_output_tokens"} if limited else None,
            **build_continued(last),
        )

    def build_response(self, status: str, **members: Any) -> bytes:
        """Return the response object as JSON."""
        base: dict[str, Any] = self._head | {
            "status": status,
            "completed_at": int(time.time()) if status == "completed" else None,
            "error": None,
            "incomplete_details": None,
            "output": [],
            "usage": None,
        }
        return orjson.dumps(base | members)[:-1] + b"," + self._tail

    def _usage(self, last: TextDelta, output: Output) -> dict[str, Any]:
        cached, prompt_tokens = 0, self._batch.prompt_tokens
        # `isolated_cache` is True if tenants do not trust each other. Then do not report the number
        # of cached tokens: it would show that another tenant has sent the same prompt.
        if not self._batch.caller.isolated_cache:
            cached = count_cached_tokens([last], prompt_tokens)
        return {
            "input_tokens": prompt_tokens,
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
            "output_tokens": last.tokens,
            "output_tokens_details": {"reasoning_tokens": output.reasoning_tokens},
            "total_tokens": prompt_tokens + last.tokens,
        }

    def _frame_failure(self, error: Failure) -> bytes:
        stream = self._stream or ResponseEventStream(self, None)
        status = status_of(error)
        code = "server_error" if status >= 500 else "invalid_prompt"
        if status == 429:
            code = "rate_limit_exceeded"
        fields = {"code": code, "message": failures.build_message(error)}
        return stream.build_failure(fields, failures.build_envelope(error))


def _logprobs(prompts: Prompts, entries: list[TokenLogprob]) -> list[dict[str, Any]]:
    content: list[dict[str, Any]] = build_chat_logprobs(entries, prompts, as_ids=False)["content"]
    return content

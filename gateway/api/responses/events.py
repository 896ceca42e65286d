"""SSE events of a streamed response.

All text events of an output item begin with the same bytes. These bytes are serialized once for
each item, so a text event costs as little CPU as a frame of a chat stream.

See decision 014 in docs/decisions.
"""

from __future__ import annotations

from typing import Any, Protocol

import orjson

from gateway.api.openai.answers import Body
from gateway.api.responses.output import Form, Item, Output, OutputPiece
from gateway.deltas import TextDelta

_EVENT_END = b"}\n\n"


class ResponseBuilder(Protocol):
    """Builder of the response objects that the events of a stream contain."""

    form: Form
    holds_last_event: bool
    """True if the caller writes the last event of the stream, after the response is stored."""

    def build_response(self, status: str, **members: Any) -> bytes:
        """Return the response object as JSON."""

    def build_finished(self, last: TextDelta, output: Output) -> bytes:
        """Return the response object of a complete or truncated answer, as JSON."""


class ResponseEventStream:
    """A `Sink` that writes a response as SSE events, with sequence numbers from 0."""

    def __init__(self, answer: ResponseBuilder, body: Body | None) -> None:
        self._answer = answer
        self._body = body
        self._output = Output(answer.form)
        self._number = 0
        self.response = b""
        """The response object at the end of the stream; empty before."""
        self.last_event = b""
        """The last event, if the caller writes it; b"" otherwise."""
        self._open: Item | None = None
        self._has_begun = self._created = False
        # Serialized beginnings of the open item's delta events; empty if its text is not streamed.
        self._delta_prefixes: tuple[bytes, ...] = ()
        self._plain: list[str] | None = None

    def accept(self, index: int, delta: TextDelta) -> bool:
        assert self._body is not None
        if delta.events is None and self._plain is not None and delta.finish is None:
            # Fast path: every token of a plain text answer.
            if not delta.text:
                return True
            self._plain.append(delta.text)
            return self._body.write(self._frame_text(delta.text))
        frames = self._frame_opening()
        for piece in self._output.take(delta):
            frames += self._frame_piece(piece)
        if delta.finish is not None:
            cut = self._output.is_cut(delta)
            frames += self._close_item(cut=cut)
            kind = "response.incomplete" if cut else "response.completed"
            self.response = self._answer.build_finished(delta, self._output)
            last = self._frame_lifecycle(kind, self.response)
            if self._answer.holds_last_event:
                self.last_event = last
            else:
                frames += last
        return not frames or self._body.write(frames)

    async def drain(self, by: float | None = None) -> None:
        assert self._body is not None
        await self._body.drain(by)

    def build_failure(self, error: dict[str, Any], envelope: bytes) -> bytes:
        """Return the events that end a failed stream: `response.failed` and `error`.

        OpenAI's packages raise an exception only for the event `error`. Some agents recognize only
        `response.failed`. So both events are sent.
        """
        output = [item.build_end(cut=item is self._open) for item in self._output.items]
        self.response = self._answer.build_response("failed", error=error, output=output)
        if self.last_event:
            self._number -= 1  # Use the number of the withheld event, which was not sent
        frames = self._frame_opening() + self._frame_lifecycle("response.failed", self.response)
        # Add the error's fields at the top level of the event, as OpenAI's types define it. The
        # event also has the error envelope, with the same fields in `error`.
        fields = orjson.loads(envelope)
        fields |= {name: fields["error"][name] for name in ("code", "message", "param")}
        return frames + self._frame_event("error", **fields)

    def build_queued_events(self) -> bytes:
        """Return the first events of a background response, sent before the generation starts."""
        self._created = True
        response = self._answer.build_response("queued")
        return self._frame_lifecycle("response.created", response) + self._frame_lifecycle(
            "response.queued", response
        )

    def _frame_opening(self) -> bytes:
        if self._has_begun:
            return b""
        self._has_begun = True
        response = self._answer.build_response("in_progress")
        frames = b"" if self._created else self._frame_lifecycle("response.created", response)
        return frames + self._frame_lifecycle("response.in_progress", response)

    def _frame_piece(self, piece: OutputPiece) -> bytes:
        item, text, logprobs = piece
        frames = b""
        if item is not self._open:
            frames = self._close_item(cut=False) + self._start_item(item)
        if logprobs:
            where = {"item_id": item.id, "output_index": item.index, "content_index": 0}
            kind = "response.output_text.delta"
            return frames + self._frame_event(kind, **where, delta=text, logprobs=logprobs)
        return frames + self._frame_text(text) if text else frames

    def _frame_text(self, text: str) -> bytes:
        """Return the delta events for new text of the open item."""
        text_json = orjson.dumps(text)
        frames = b""
        for prefix in self._delta_prefixes:
            frames += prefix + b'%d,"delta":' % self._number + text_json + _EVENT_END
            self._number += 1
        return frames

    def _start_item(self, item: Item) -> bytes:
        self._open = item
        self._plain = item.texts if item.kind == "message" and not self._has_logprobs else None
        frames = self._frame_event(
            "response.output_item.added", output_index=item.index, item=item.build_start()
        )
        where = {"item_id": item.id, "output_index": item.index}
        if item.kind == "function_call":
            self._delta_prefixes = (
                _build_delta_prefix("response.function_call_arguments.delta", where),
            )
            return frames
        if item.kind in ("custom_tool_call", "tool_search_call"):
            self._delta_prefixes = ()  # the input is only known when all arguments are complete
            return frames
        part = where | {"content_index": 0}
        frames += self._frame_event("response.content_part.added", **part, part=item.build_part(""))
        if item.kind == "message":
            more = part | {"logprobs": []}
            self._delta_prefixes = (_build_delta_prefix("response.output_text.delta", more),)
            return frames
        self._delta_prefixes = (_build_delta_prefix("response.reasoning_text.delta", part),)
        if self._answer.form.with_summary:
            summary = where | {"summary_index": 0}
            empty = {"type": "summary_text", "text": ""}
            frames += self._frame_event(
                "response.reasoning_summary_part.added", **summary, part=empty
            )
            self._delta_prefixes += (
                _build_delta_prefix("response.reasoning_summary_text.delta", summary),
            )
        return frames

    def _close_item(self, *, cut: bool) -> bytes:
        """Return the events that end the open item; b"" if no item is open."""
        item = self._open
        if item is None:
            return b""
        self._open = self._plain = None
        item_end = item.build_end(cut=cut)
        where = {"item_id": item.id, "output_index": item.index}
        part = where | {"content_index": 0}
        frames = b""
        if item.kind == "function_call":
            kind = "response.function_call_arguments.done"
            frames = self._frame_event(
                kind, **where, name=item_end["name"], arguments=item_end["arguments"]
            )
        elif item.kind == "custom_tool_call":
            kind = "response.custom_tool_call_input"
            if item_end["input"]:
                frames = self._frame_event(f"{kind}.delta", **where, delta=item_end["input"])
            frames += self._frame_event(f"{kind}.done", **where, input=item_end["input"])
        elif item.kind == "tool_search_call":
            pass  # a tool search call has no events for its arguments
        elif item.kind == "message":
            [part_end] = item_end["content"]
            kind, text, logprobs = (
                "response.output_text.done",
                part_end["text"],
                part_end["logprobs"],
            )
            frames = self._frame_event(kind, **part, text=text, logprobs=logprobs)
            frames += self._frame_event("response.content_part.done", **part, part=part_end)
        else:
            [part_end] = item_end["content"]
            frames = self._frame_event(
                "response.reasoning_text.done", **part, text=part_end["text"]
            )
            frames += self._frame_event("response.content_part.done", **part, part=part_end)
            for summary in item_end["summary"]:
                of = where | {"summary_index": 0}
                kind = "response.reasoning_summary"
                frames += self._frame_event(f"{kind}_text.done", **of, text=summary["text"])
                frames += self._frame_event(f"{kind}_part.done", **of, part=summary)
        return frames + self._frame_event(
            "response.output_item.done", output_index=item.index, item=item_end
        )

    @property
    def _has_logprobs(self) -> bool:
        return self._answer.form.logprobs is not None

    def _frame_event(self, kind: str, **members: Any) -> bytes:
        data = orjson.dumps({"type": kind, "sequence_number": self._number, **members})
        self._number += 1
        return b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n"

    def _frame_lifecycle(self, kind: str, response: bytes) -> bytes:
        return self._frame_event(kind, response=orjson.Fragment(response))


def _build_delta_prefix(kind: str, members: dict[str, Any]) -> bytes:
    """Return the first bytes of a delta event, up to its sequence number."""
    head = orjson.dumps({"type": kind, **members})[:-1]
    return b"event: " + kind.encode() + b"\ndata: " + head + b',"sequence_number":'

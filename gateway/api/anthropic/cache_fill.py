"""Answer to a request with `max_tokens: 0`, which only fills the engine's prompt cache.

An engine fills its cache only if it generates a token. So the gateway asks for one token and leaves
it out of the answer. The usage log counts this token.
"""

from __future__ import annotations

from dataclasses import replace

from gateway.api.anthropic.answers import MessageAnswer
from gateway.api.openai.answers import Body
from gateway.api.openai.chunks import UsageFrames
from gateway.deltas import Sink, TextDelta


class CacheFillAnswer(MessageAnswer):
    """Encoder of the answer to a request with `max_tokens: 0`: a message without content."""

    def stream(self, body: Body, usage: UsageFrames) -> Sink:
        return _WithoutOutput(super().stream(body, usage))

    def build_complete(self, received: list[list[TextDelta]], *, num_returned: int | None) -> bytes:
        (deltas,) = received
        return super().build_complete([[_without_output(deltas[-1])]], num_returned=num_returned)


class _WithoutOutput:
    """A `Sink` that removes the generated output from each delta, and passes the delta to another
    sink."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink

    def accept(self, index: int, delta: TextDelta) -> bool:
        return self._sink.accept(index, _without_output(delta))

    async def drain(self, by: float | None = None) -> None:
        await self._sink.drain(by)


def _without_output(delta: TextDelta) -> TextDelta:
    finish = delta.finish and "length"
    return replace(delta, text="", tokens=0, finish=finish, events=None, stop=None)

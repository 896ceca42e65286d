"""Conversion of other protocols' messages to OpenAI's chat messages.

A turn is a run of consecutive messages of one role, which becomes one chat message.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field
from typing import Any

from gateway.api.validation import show_value
from gateway.errors import InvalidRequest

# Separator of joined texts. Without it, the last word of a text and the first word of the next text
# would become one word.
BETWEEN = "\n"


@dataclass(slots=True)
class Turn:
    """Consecutive messages of one role. A turn of the role `tool` is the result of a single tool
    call."""

    role: str
    texts: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    answers: str | None = None
    """Id of the call that produced the result; only for the role `tool`."""

    def add_call(self, call_id: str, name: str, arguments: str) -> None:
        function = {"name": name, "arguments": arguments}
        self.calls.append({"id": call_id, "type": "function", "function": function})

    def to_message(self) -> dict[str, Any]:
        """Return the turn as one message of an OpenAI chat."""
        message: dict[str, Any] = {"role": self.role, "content": BETWEEN.join(self.texts)}
        if self.thoughts:
            message["reasoning_content"] = BETWEEN.join(self.thoughts)
        if self.calls:
            message["tool_calls"] = self.calls
        if self.answers is not None:
            message["tool_call_id"] = self.answers
        return message


def check_result(
    call_id: str | None, calls: Container[str | None], where: str, call: str, result: str
) -> None:
    """Raise InvalidRequest if a tool's result belongs to none of the preceding calls.

    Args:
        call_id: the id of the result's call; None if the request names none.
        calls: the ids of the calls that precede the result.
        where: the path of the parameter, for the error.
        call: the protocol's word for a call, for the error.
        result: the protocol's word for a result, for the error.
    """
    if call_id not in calls:
        found = call if call_id is None else f"{call} {show_value(call_id)}"
        raise InvalidRequest(f"{where}: no {found} comes before this {result}.", param=where)


def get_or_add_turn(turns: list[Turn], role: str) -> Turn:
    """Return the last turn if it has this role; else append a new turn."""
    if not turns or turns[-1].role != role:
        turns.append(Turn(role))
    return turns[-1]

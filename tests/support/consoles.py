"""A console client that reads the state, follows its changes and acts on it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx

from gateway.console.patch import apply_patch
from tests.support.gateway_process import GatewayProcess

_WITHIN_S = 300.0

State = dict[str, Any]


def state_of(gateway: GatewayProcess, admin: str) -> State:
    with gateway.client(admin) as client:
        answer = client.get("/v1/admin/state")
    assert answer.status_code == 200, answer.text
    state: State = answer.json()
    return state


def until(gateway: GatewayProcess, admin: str, holds: Callable[[State], Any]) -> Any:
    """Wait until `holds` returns a true value for the state, and return that value."""
    deadline = time.monotonic() + _WITHIN_S
    while not (found := holds(state := state_of(gateway, admin))):
        assert time.monotonic() < deadline, json.dumps(state, indent=1)
        time.sleep(0.05)
    return found


def states(answer: httpx.Response) -> Iterator[State]:
    """Yield the state after the first SSE event, and again after each change event."""
    state: State | None = None
    name = ""
    for line in answer.iter_lines():
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("data: "):
            told = json.loads(line.removeprefix("data: "))
            if name == "state":
                assert state is None, "the whole state comes once"
                state = told
            else:
                assert name == "change"
                assert state is not None
                state = apply_patch(state, told)
            yield state

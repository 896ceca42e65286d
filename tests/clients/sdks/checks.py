"""What the scripts of this folder share: what they ask, and how they tell what became of it.

They run in environments of their own, so nothing here is of the project.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

from pydantic import BaseModel, Field

BASE_URL = os.environ["GATEWAY_BASE_URL"]
CAPITAL = "What is the capital of France?"
WEATHER = "What is the weather in Paris?"
TOO_LONG = "Repeat: " + "tree " * 5000


class Person(BaseModel):
    """A person."""

    name: str = Field(max_length=12)
    mood: Literal["happy", "sad"]


def forecast(city: str) -> str:
    """What the tool `get_weather` answers: 21 degrees for Paris."""
    return f'{{"temperature": {len(city) + 16}}}'


@contextmanager
def refused(*kinds: type[Exception]) -> Iterator[list[Any]]:
    """Takes the error that is to come, of one of these kinds; afterwards it is in the list."""
    caught: list[Any] = []
    try:
        yield caught
    except kinds as error:
        caught.append(error)
    assert caught, "it was answered"


def run(*checks: Callable[[], Any]) -> None:
    """Runs all, in one event loop, and ends the process: with 1 where one has failed."""
    sys.exit(asyncio.run(_run(checks)))


async def _run(checks: tuple[Callable[[], Any], ...]) -> int:
    failed = 0
    for check in checks:
        started = time.monotonic()
        try:
            if inspect.isawaitable(running := check()):
                await running
        except Exception:
            failed = 1
            print(f"not ok {check.__name__}\n{traceback.format_exc()}")
        else:
            print(f"ok {check.__name__} ({time.monotonic() - started:.2f} s)")
    return failed

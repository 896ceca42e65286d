"""Helpers for the scripts of this folder: questions, and the report of results.

The scripts run in separate environments, so nothing is imported from the project.
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
    """Return the answer of the tool `get_weather`: 21 degrees for Paris."""
    return f'{{"temperature": {len(city) + 16}}}'


@contextmanager
def refused(*kinds: type[Exception]) -> Iterator[list[Any]]:
    """Expect an error of one of these types, and store it in the yielded list."""
    caught: list[Any] = []
    try:
        yield caught
    except kinds as error:
        caught.append(error)
    assert caught, "it was answered"


def run(*checks: Callable[[], Any]) -> None:
    """Run all checks in one event loop, and exit with 1 if one has failed."""
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

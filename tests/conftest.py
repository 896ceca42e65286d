"""The real stack, started once for all tests that ask for it, and clients for it."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator, Iterator

import openai
import pytest

from tests.local_stack import Stack, Up

__all__ = ["Stack"]


@pytest.fixture(scope="session")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    with Up(tmp_path_factory.mktemp("stack"), "--port", "0") as up:
        up.wait_ready()
        yield up
        up.remember_processes()
        up.send(signal.SIGTERM)
        assert up.wait() == 0, up.stderr
        up.assert_nothing_is_left()


@pytest.fixture(scope="session")
def stack(up: Up) -> Stack:
    return up.state()


@pytest.fixture
def client(stack: Stack) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{stack.gateway}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
async def async_client(stack: Stack) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"{stack.gateway}/v1", api_key="none", max_retries=0
    ) as client:
        yield client

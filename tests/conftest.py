"""The real stack, started once for all tests that ask for it, and clients for it."""

from __future__ import annotations

import os
import signal
import ssl
from collections.abc import AsyncIterator, Iterator
from typing import Any

import certifi
import hypothesis
import openai
import pytest
from redis import Redis

from tests.support.local_stack import Stack, Up
from tests.support.redis_server import RedisServer, running_redis

# Machines that run tests are busy: an example's time says nothing about the code.
hypothesis.settings.register_profile(
    "any machine",
    deadline=None,
    max_examples=60,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("any machine")


# Each client of httpx, and of the openai SDK, reads the certificates of all authorities anew: 60 ms
# of CPU time, for servers that are all on this machine.
_make_context = ssl.create_default_context
_AUTHORITIES = os.environ.get("SSL_CERT_FILE") or certifi.where()  # as httpx takes it
_shared_context = _make_context(cafile=_AUTHORITIES)


def _context(*args: Any, **kwargs: Any) -> ssl.SSLContext:
    if args or kwargs != {"cafile": _AUTHORITIES}:
        return _make_context(*args, **kwargs)
    return _shared_context


ssl.create_default_context = _context

# What `gateway up` is told for each value of --triton-mode.
TRITON_MODES: dict[str, tuple[list[str], dict[str, str]]] = {
    "token": ([], {}),
    "ensemble": ([], {"triton_mode": "text", "triton_text_model": "ensemble"}),
    "bls": (
        ["--parameter", "accumulate_tokens=true", "--parameter", "bls_instance_count=8"],
        {"triton_mode": "text", "triton_text_model": "tensorrt_llm_bls"},
    ),
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--triton-mode",
        choices=TRITON_MODES,
        default="token",
        help="what the stack's gateway drives; text models skip what they cannot do",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # Files with slow tests come first, so that no process is left alone with one at the end.
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)
    mode = config.getoption("--triton-mode")
    for item in items:
        for mark in item.iter_markers("token_mode_only"):
            if mode in (mark.kwargs.get("of") or TRITON_MODES) and mode != "token":
                item.add_marker(pytest.mark.skip(reason=mark.args[0]))


@pytest.fixture(scope="session")
def up(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    arguments, settings = TRITON_MODES[request.config.getoption("--triton-mode")]
    with Up(tmp_path_factory.mktemp("stack"), "--port", "0", *arguments, **settings) as up:
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


@pytest.fixture
def redis_server() -> Iterator[RedisServer]:
    """One of the test's own, that it may stop, kill and damage."""
    with running_redis() as server:
        yield server


@pytest.fixture
def at_redis(redis_server: RedisServer) -> Iterator[Redis]:
    """To look, to damage, to empty."""
    with redis_server.client() as client:
        yield client


@pytest.fixture(scope="module")
def shared_redis() -> Iterator[RedisServer]:
    """One for the tests of a file, which leave it running."""
    with running_redis() as server:
        yield server


@pytest.fixture
def at_shared_redis(shared_redis: RedisServer) -> Iterator[Redis]:
    """Emptied first."""
    with shared_redis.client() as client:
        client.flushall()
        yield client

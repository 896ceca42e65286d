"""Fixtures for all tests: the real stack, started once per session, and clients for it."""

from __future__ import annotations

import contextlib
import gc
import inspect
import itertools
import os
import re
import signal
import ssl
from collections.abc import AsyncIterator, Generator, Iterator, Sequence
from contextlib import suppress
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import certifi
import httpx
import openai
import pytest
from redis import Redis
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

from ops.local_stack.repository import REPOSITORY
from tests.support import examples, vector_models
from tests.support.local_stack import Stack, Up
from tests.support.patience import PATIENCE_S
from tests.support.postgresql_server import PostgresqlServer, available, running_postgresql
from tests.support.redis_server import RedisServer, running_redis
from tests.support.triton_server import LONG_SEQ_LEN, STARVED, long_model

examples.load_profile()

_TESTS = Path(__file__).parent

# A shell starts background commands with SIGINT ignored, and child processes inherit that. The
# tests send SIGINT to such children, so the default handler is restored.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Each client of httpx or the openai SDK would read all CA certificates again, in 60 ms of CPU time,
# although all servers are on this machine. So all clients share one TLS context.
_make_context = ssl.create_default_context
_AUTHORITIES = os.environ.get("SSL_CERT_FILE") or certifi.where()  # httpx's default
_shared_context = _make_context(cafile=_AUTHORITIES)


def _context(*args: Any, **kwargs: Any) -> ssl.SSLContext:
    if args or kwargs != {"cafile": _AUTHORITIES}:
        return _make_context(*args, **kwargs)
    return _shared_context


ssl.create_default_context = _context

# Raise httpx's default timeout of 5 s, as a busy machine may stop a server for longer. All of
# httpx's functions have this object as their default.
_unless_given: httpx.Timeout = inspect.signature(httpx.get).parameters["timeout"].default
_unless_given.connect = _unless_given.read = _unless_given.write = _unless_given.pool = 60.0

# Arguments and settings of `gateway up` for each value of --triton-mode.
TRITON_MODES: dict[str, tuple[list[str], dict[str, str]]] = {
    "token": ([], {}),
    "ensemble": ([], {"triton_mode": "text", "triton_text_model": "ensemble"}),
    "bls": (
        ["--parameter", "accumulate_tokens=true", "--parameter", "bls_instance_count=4"],
        {"triton_mode": "text", "triton_text_model": "tensorrt_llm_bls"},
    ),
    "llmapi": (["--repository", "llmapi"], {}),
    "llmapi-1.3": (["--repository", "llmapi", "--parameter", "behaves_as=1.3"], {}),
    "llmapi-1.2": (["--repository", "llmapi", "--parameter", "behaves_as=1.2"], {}),
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--triton-mode",
        choices=TRITON_MODES,
        default="token",
        help="what the stack's gateway drives; text models skip what they cannot do",
    )
    parser.addoption(
        "--in-process",
        action="store_true",
        help="only files whose tests start no server and are not slow, as `make check` does",
    )


# Names in a test file that starts a server (even a scripted one in the test's process), or that has
# slow tests.
_STARTS = re.compile(
    r"\b(?:stack|client|Up|Child|subprocess|browser|playwright|triton_server|fake_triton|redis_server"
    r"|redis_fleet|running_redis|running_sentinels|two_replicas|executor_client|xgrammar_wheels"
    r"|in_process|loop_gateway|postgresql_server|postgresql_url|processes: Processes|mark\.slow"
    r"|mark\.nightly)\b"
)

# Comments and docstrings, which name servers and clients that their file may not start.
_PROSE = re.compile(r'#.*|"""[\s\S]*?"""')


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    if not config.getoption("--in-process") or not collection_path.name.startswith("test_"):
        return None
    code = _PROSE.sub("", collection_path.read_text(encoding="utf-8"))
    return _STARTS.search(code) is not None or None


# Tests of these files take minutes and share only the session's stack, so each test may run in
# another process.
_SPLIT = ("tests/clients/test_sdks.py", "tests/docs/test_guides.py")
# Fixtures that each process starts for itself in 5 to 10 s of CPU time, and a regex for files that
# use them. The scheduler has not collected the files, so it searches their text. A missed file
# costs only time.
_STARTED = {
    "stack": re.compile(r"\b(?:vector_)?stack: Stack\b|\bup: Up\b|\b(?:async_)?client: openai\."),
    "long_stack": re.compile(r"\blong_stack: Stack\b"),
}


class _Scheduling(LoadFileScheduling):
    """A scheduler that assigns complete files to processes, like --dist loadfile.

    Files in `_SPLIT` are assigned test by test. At most half of the processes start each fixture of
    `_STARTED`, as long as there is other work.
    """

    def __init__(self, config: pytest.Config, log: Producer) -> None:
        super().__init__(config, log)
        self._root = config.rootpath
        self._has: dict[str, set[WorkerController]] = {name: set() for name in _STARTED}

    def _split_scope(self, nodeid: str) -> str:
        return nodeid if nodeid.startswith(_SPLIT) else super()._split_scope(nodeid)

    def _assign_work_unit(self, node: WorkerController) -> None:
        enough = {
            name
            for name, nodes in self._has.items()
            if node not in nodes and len(nodes) >= max(1, len(self.nodes) // 2)
        }
        scope = min(self.workqueue, key=lambda scope: len(enough & self._asks(scope)))
        for name in self._asks(scope):
            self._has[name].add(node)
        self.workqueue.move_to_end(scope, last=False)
        super()._assign_work_unit(node)

    def _asks(self, scope: str) -> frozenset[str]:
        return _asks(self._root / scope.partition("::")[0])


@cache
def _asks(file: Path) -> frozenset[str]:
    text = file.read_text(encoding="utf-8")
    return frozenset(name for name, asks in _STARTED.items() if asks.search(text))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> _Scheduling | None:
    return _Scheduling(config, log) if config.getoption("dist") == "loadfile" else None


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    config = session.config
    gc.disable()  # imported modules stay, so there is no garbage
    # In a fresh clone, each process would compile all tests and imported modules at the same time.
    # Instead, each process first compiles a different part of the files.
    if hasattr(config, "workerinput") and config.args == config.getini("testpaths"):
        files = sorted(_TESTS.rglob("test_*.py"))
        own, of = int(config.workerinput["workerid"][2:]), config.workerinput["workercount"]
        for file in files[len(files) * own // of : len(files) * (own + 1) // of]:
            with suppress(Exception):  # pytest reports import errors later
                import_module(".".join(file.relative_to(_TESTS.parent).with_suffix("").parts))
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # Files with slow tests run first, so that none is left for a single process at the end. The
    # others run in reverse order, as triton_repo, system and lora_store have long ones.
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    place = {path: n for n, path in enumerate(dict.fromkeys(item.path for item in items))}
    items.sort(
        key=lambda item: (0, place[item.path]) if item.path in slow else (1, -place[item.path])
    )
    mode = config.getoption("--triton-mode").partition("-")[0]
    for item in items:
        if mode == "llmapi" and item.get_closest_marker("llmapi_refuses"):
            item.add_marker(pytest.mark.xfail(raises=openai.BadRequestError, strict=True))
            continue
        for mark in item.iter_markers("token_mode_only"):
            if mode in (mark.kwargs.get("of") or TRITON_MODES) and mode != "token":
                item.add_marker(pytest.mark.skip(reason=mark.args[0]))


def pytest_collection_finish() -> None:
    # Exclude all objects that imports have created from garbage collection, as they stay.
    gc.collect()
    gc.freeze()


@contextlib.contextmanager
def _up(mode: str, folder: Path, *more: str, load_models: Sequence[str] = ()) -> Iterator[Up]:
    arguments, settings = TRITON_MODES[mode]
    with contextlib.ExitStack() as started:
        for number in itertools.count():
            (own := folder / str(number)).mkdir()
            up = Up(own, "--port", "0", *arguments, *more, load_models=load_models, **settings)
            started.enter_context(up)
            try:
                up.wait_ready()
                break
            except AssertionError:
                if STARVED not in up.stderr:
                    raise
        yield up
        up.remember_processes()
        up.send(signal.SIGTERM)
        assert up.wait() == 0, up.stderr
        up.assert_nothing_is_left()
        assert up.stdout.count("\n") == 1, up.stdout  # one line: ready at this URL


@pytest.fixture(scope="session")
def up(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    mode = request.config.getoption("--triton-mode")
    # Load all models of the repository. Tests may load more later.
    with _up(mode, tmp_path_factory.mktemp("stack"), load_models=("*",)) as up:
        yield up


@pytest.fixture(scope="session")
def stack(up: Up) -> Stack:
    return up.state()


@pytest.fixture(scope="session")
def vector_stack(up: Up, stack: Stack) -> Stack:
    """Return the stack, with the models of `tests/support/vector_models.py` in its Triton."""
    vector_models.write_models(up.state_dir / REPOSITORY)
    vector_models.load_models(stack.triton_http)
    return stack


@pytest.fixture(scope="session")
def long_stack(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stack]:
    """Yield a second stack whose answers of `LONG_ANSWER` tokens outlast any pause of a process."""
    mode = request.config.getoption("--triton-mode")
    folder = tmp_path_factory.mktemp("long")
    model = str(long_model(folder))
    only = ("tensorrt_llm",) if mode == "token" else ()
    # Memory is only used when written, so a cache reserved for cancelled answers costs nothing.
    cache = f"max_tokens_in_paged_kv_cache={8 * LONG_SEQ_LEN}"
    arguments = ("--model", model, "--model-name", "demo", "--parameter", cache)
    with _up(mode, folder, *arguments, load_models=only) as up:
        yield up.state()


@pytest.fixture
def client(stack: Stack) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{stack.gateway}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S
    ) as client:
        yield client


@pytest.fixture
async def async_client(stack: Stack) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"{stack.gateway}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S
    ) as client:
        yield client


@pytest.fixture
def redis_server() -> Iterator[RedisServer]:
    """Yield a Redis for this test alone, which the test may stop, kill and damage."""
    with running_redis() as server:
        yield server


@pytest.fixture
def at_redis(redis_server: RedisServer) -> Iterator[Redis]:
    """Yield a client for inspecting, damaging and flushing the test's Redis."""
    with redis_server.client() as client:
        yield client


@pytest.fixture(scope="module")
def shared_redis() -> Iterator[RedisServer]:
    """Yield a Redis for all tests of a file, which must leave it running."""
    with running_redis() as server:
        yield server


@pytest.fixture
def at_shared_redis(shared_redis: RedisServer) -> Iterator[Redis]:
    """Yield a client of the shared Redis, after flushing it."""
    with shared_redis.client() as client:
        client.flushall()
        yield client


@pytest.fixture(scope="session")
def postgresql() -> Iterator[PostgresqlServer]:
    """Yield a PostgreSQL of the newest release, which tests must leave running."""
    if not available():
        pytest.skip("PostgreSQL is not installed: make setup")
    with running_postgresql() as server:
        yield server


@pytest.fixture
def postgresql_url(postgresql: PostgresqlServer) -> Iterator[str]:
    """Yield the URL of an empty database for this test alone."""
    with postgresql.database() as url:
        yield url

"""The real stack, started once for all tests that ask for it, and clients for it."""

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
from tests.support.redis_server import RedisServer, running_redis
from tests.support.triton_server import LONG_SEQ_LEN, STARVED, long_model

examples.load_profile()

_TESTS = Path(__file__).parent

# Processes inherit that SIGINT is ignored, as a shell has it for what it starts in the background.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

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

# Of httpx where a test gives no timeout, else 5 s: a busy machine may give a server no turn for as
# long. All of httpx's functions have this one object as their default.
_unless_given: httpx.Timeout = inspect.signature(httpx.get).parameters["timeout"].default
_unless_given.connect = _unless_given.read = _unless_given.write = _unless_given.pool = 60.0

# What `gateway up` is told for each value of --triton-mode.
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


# Names by which a file of tests starts a server, a scripted one in its own process included, or is
# slow.
_STARTS = re.compile(
    r"\b(?:stack|client|Up|subprocess|browser|playwright|triton_server|fake_triton|redis_server"
    r"|redis_fleet|running_redis|running_sentinels|two_replicas|executor_client|xgrammar_wheels"
    r"|in_process|loop_gateway|mark\.slow|mark\.nightly)\b"
)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    if not config.getoption("--in-process") or not collection_path.name.startswith("test_"):
        return None
    return _STARTS.search(collection_path.read_text(encoding="utf-8")) is not None or None


# Their tests share nothing but the stack of all tests, and take minutes: each is a unit of its own.
_SPLIT = ("tests/clients/test_sdks.py", "tests/docs/test_guides.py")
# What each process would start for itself, at 5 to 10 s of CPU time, and how a file asks for it:
# who hands out files has collected none. Where this misses one, time is lost and no more.
_STARTED = {
    "stack": re.compile(r"\b(?:vector_)?stack: Stack\b|\bup: Up\b|\b(?:async_)?client: openai\."),
    "long_stack": re.compile(r"\blong_stack: Stack\b"),
}


class _Scheduling(LoadFileScheduling):
    """Gives a process whole files, as --dist loadfile does, but for those of `_SPLIT`.

    At most half of the processes start each of `_STARTED`, as long as there is other work.
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
    gc.disable()  # what is imported stays: there is nothing to find
    # In a fresh clone nothing is compiled yet, and each process would compile all tests, and all
    # that they import, beside the others. Each begins with a share of its own.
    if hasattr(config, "workerinput") and config.args == config.getini("testpaths"):
        files = sorted(_TESTS.rglob("test_*.py"))
        own, of = int(config.workerinput["workerid"][2:]), config.workerinput["workercount"]
        for file in files[len(files) * own // of : len(files) * (own + 1) // of]:
            with suppress(Exception):  # which pytest tells in its turn
                import_module(".".join(file.relative_to(_TESTS.parent).with_suffix("").parts))
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # Files with slow tests come first, so that no process is left alone with one at the end. The
    # others come backwards: triton_repo, system and lora_store have the long ones among them.
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
    # What all modules of tests have imported stays: the garbage collector need not look through it
    # again and again.
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
        assert up.stdout.count("\n") == 1, up.stdout  # that it is ready, and where


@pytest.fixture(scope="session")
def up(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    mode = request.config.getoption("--triton-mode")
    # All of the repository, and later what is loaded beside them.
    with _up(mode, tmp_path_factory.mktemp("stack"), load_models=("*",)) as up:
        yield up


@pytest.fixture(scope="session")
def stack(up: Up) -> Stack:
    return up.state()


@pytest.fixture(scope="session")
def vector_stack(up: Up, stack: Stack) -> Stack:
    """The stack, whose Triton has the models of `tests/support/vector_models.py` as well."""
    vector_models.write_models(up.state_dir / REPOSITORY)
    vector_models.load_models(stack.triton_http)
    return stack


@pytest.fixture(scope="session")
def long_stack(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stack]:
    """Another, for answers of `LONG_ANSWER` tokens: no stall of a process is as long as one."""
    mode = request.config.getoption("--triton-mode")
    folder = tmp_path_factory.mktemp("long")
    model = str(long_model(folder))
    only = ("tensorrt_llm",) if mode == "token" else ()
    # Memory is taken as it is written: what is reserved for answers that nobody awaits costs none.
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

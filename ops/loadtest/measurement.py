"""Measurement of `gateway bench`.

A mode selects what is measured: the model that runs the engine (`core`), the ensemble (`e2e`) or
the gateway (`chat`). Every mode is measured at every concurrency, with the same requests.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import httpx

from gateway.errors import EngineUnavailable
from gateway.tokenization.prompts import Prompts
from gateway.triton.client import TritonClient
from gateway.triton.direct import DirectModel
from ops.errors import OptionError
from ops.loadtest.arrivals import Arrivals, send_times
from ops.loadtest.llmapi_target import LlmapiTarget
from ops.loadtest.progress import Progress
from ops.loadtest.requests import BenchRequest, RequestSource
from ops.loadtest.running import run
from ops.loadtest.sample import BenchRun, Mode, Sample, append
from ops.loadtest.targets import BenchTarget, GatewayTarget, TritonTarget, first_model
from ops.local_stack.state import StackState

_TRITON, _GATEWAY = "localhost:8001", "http://127.0.0.1:9000"
_WARM_UP_TOKENS = 100
_PREPROCESSING = "preprocessing"
_MAX_TURNS, _TURN = 10, 4


@dataclass(frozen=True)
class Servers:
    """Addresses of the servers, and names of the models to measure.

    If `triton` or `gateway` is None, the address of the local stack's server is used. If
    `chat_model` is None, the gateway's first model is used.
    """

    triton: str | None
    gateway: str | None
    core_model: str
    text_model: str
    chat_model: str | None
    api_key: str | None
    timeout_s: float

    def with_defaults(self, state_dir: Path) -> Servers:
        """Return a copy with all addresses set.

        Missing addresses are those of the local stack in `state_dir`. If no stack runs there, they
        are the default ports of Triton and the gateway on this machine.
        """
        try:
            state = StackState.read(state_dir)
        except FileNotFoundError:
            triton, gateway = _TRITON, _GATEWAY
        else:
            triton, gateway = state.triton_grpc, state.gateway
        return replace(
            self,
            triton=self.triton or triton,
            gateway=(self.gateway or gateway).rstrip("/"),
        )


@dataclass(frozen=True)
class BenchLoad:
    """The load that the test generates.

    Attributes:
        levels: the concurrencies to measure; None is no limit.
        rate: requests per second; -1 sends all at once.
        arrivals: distribution of the time between requests.
        requests: maximum number of requests in a run.
        max_input: maximum length of a prompt in tokens; None is no limit.
        warm_up: number of requests before the measurement.
    """

    levels: list[int | None]
    rate: float
    arrivals: Arrivals
    requests: int
    max_input: int | None
    warm_up: int
    seed: int
    streaming: bool


@dataclass(frozen=True)
class BenchPlan:
    modes: list[Mode]
    servers: Servers
    source: RequestSource
    load: BenchLoad
    tokenizer_dir: Path | None
    through_template: bool


async def measure(plan: BenchPlan, progress: Progress) -> list[BenchRun]:
    """Measure each mode at each concurrency, and return a `BenchRun` for each of these pairs.

    Raises:
        GatewayError: a server cannot be reached or refuses a request.
        TimeoutError: a server does not respond.
        OptionError: an option is wrong.
        ValueError: the workload has no requests.
    """
    load = plan.load
    async with AsyncExitStack() as stack:
        client = TritonClient(plan.servers.triton or _TRITON)
        stack.push_async_callback(client.close)
        prompts = await _prompts(plan, client)
        stack.callback(prompts.close)
        targets = [
            await stack.enter_async_context(_target(plan, mode, client, prompts))
            for mode in plan.modes
        ]
        requests = plan.source.requests(
            prompts, load.requests, load.max_input, random.Random(load.seed)
        )
        if not requests:
            raise ValueError("the workload has no request within --max-input-len")
        times = send_times(len(requests), load.rate, load.arrivals, random.Random(load.seed))
        rounds = [(target, level) for target in targets for level in load.levels]
        if len(rounds) > 1:
            # Fill the KV cache with all prompts, so that the first run finds the same cache as the
            # later runs.
            await _prime(targets[0], requests, plan, progress)
        for target in targets:
            await _warm_up(target, requests[0], plan, progress)
        found: dict[tuple[Mode, int | None], list[Sample]] = {}
        for level in load.levels:
            for part in _split_requests(len(requests), level, load, len(targets)):
                for target in targets:
                    samples = found.setdefault((target.mode, level), [])
                    title = target.mode if level is None else f"{target.mode}, {level} at a time"
                    new = await run(
                        target,
                        requests[part],
                        times[part],
                        level,
                        plan.servers.timeout_s,
                        partial(_report_progress, progress, title, samples[:], len(requests)),
                    )
                    append(samples, new)
        return [
            BenchRun(target.mode, target.what, level, found[target.mode, level])
            for target in targets
            for level in load.levels
        ]


def _split_requests(count: int, level: int | None, load: BenchLoad, modes: int) -> list[slice]:
    """Return slices of the requests. Each slice is sent to all modes before the next slice.

    Other load on the machine thus affects all modes equally. The function returns several slices
    only if there are several modes, the concurrency is limited, and the request rate is unlimited.
    Each of several slices has at least `_TURN` times as many requests as run concurrently.
    """
    turns = 1
    if modes > 1 and level is not None and load.rate == -1:
        turns = max(1, min(_MAX_TURNS, count // (_TURN * level)))
    bounds = [count * turn // turns for turn in range(turns + 1)]
    return [slice(*pair) for pair in pairwise(bounds)]


def _report_progress(
    progress: Progress, title: str, before: list[Sample], total: int, done: int, failed: int
) -> None:
    failed += sum(bool(sample.error) for sample in before)
    progress.update(title, len(before) + done, failed, total)


async def _prompts(plan: BenchPlan, client: TritonClient) -> Prompts:
    folder = plan.tokenizer_dir
    if folder is None:
        try:
            model = await DirectModel.find(client, _PREPROCESSING)
        except EngineUnavailable as error:
            raise OptionError(f"--tokenizer-dir: needed. {error.message}") from error
        folder = Path(model.tokenizer_dir)
        if not (folder / "tokenizer.json").exists():
            raise OptionError(f"--tokenizer-dir: needed, as {model.name}'s is not seen from here.")
    return Prompts.load(folder)


@asynccontextmanager
async def _target(
    plan: BenchPlan, mode: Mode, client: TritonClient, prompts: Prompts
) -> AsyncIterator[BenchTarget]:
    servers, streaming = plan.servers, plan.load.streaming
    if mode != "chat":
        name = servers.core_model if mode == "core" else servers.text_model
        model = await DirectModel.find(client, name)
        if streaming and not model.decoupled:
            raise OptionError(f"--streaming: {model.name} is not decoupled.")
        if model.llmapi:
            yield LlmapiTarget(mode, model, prompts, streaming=streaming)
        else:
            yield TritonTarget(mode, model, streaming=streaming)
        return
    url = servers.gateway or _GATEWAY
    headers = {"authorization": f"Bearer {servers.api_key}"} if servers.api_key else {}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(
        timeout=servers.timeout_s, limits=limits, headers=headers, trust_env=False
    ) as http:
        name = servers.chat_model or await first_model(http, url)
        template = plan.through_template
        yield GatewayTarget(http, url, name, through_template=template, streaming=streaming)


async def _prime(
    target: BenchTarget, requests: list[BenchRequest], plan: BenchPlan, progress: Progress
) -> None:
    """Send every prompt once, for one output token, to fill the engine's KV cache."""
    progress.begin("every prompt once, for the KV cache")
    once = [replace(request, output_tokens=1) for request in requests]
    await run(target, once, [0.0] * len(once), 8, plan.servers.timeout_s, lambda *_: None)


async def _warm_up(
    target: BenchTarget, request: BenchRequest, plan: BenchPlan, progress: Progress
) -> None:
    count = plan.load.warm_up
    if count:
        progress.begin(f"{target.mode}: warm-up, {count} requests")
        request = replace(request, output_tokens=min(_WARM_UP_TOKENS, request.output_tokens))
        times = [0.0] * count
        await run(target, [request] * count, times, 1, plan.servers.timeout_s, lambda *_: None)

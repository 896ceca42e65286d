"""A scripted worker for Dynamo's frontend, without an engine.

    python -m bench.dynamo_worker --model FOLDER --name NAME [--events FILE]

As in the scripted Triton (`bench.upstream`), a request's `max_tokens` and `seed` select the length
and the pace of the answer. FILE is the log of the requests' events. Dynamo stops a request through
the request's `Context` object. The worker logs this as a stop request. The worker needs the
packages ai-dynamo and ai-dynamo-runtime.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import uvloop
from dynamo.llm import ModelInput, ModelRuntimeConfig, ModelType, WorkerType, register_model
from dynamo.runtime import Context, DistributedRuntime

from bench.grpc_server import Log
from bench.pace import Pacer
from bench.upstream import TOKEN

_CONTEXT_LENGTH = 1_000_000
_WAITING = 64


class ScriptedAnswer:
    """The tokens of one response, which the worker's `Pacer` releases one at a time.

    `DynamoWorker.generate` takes the released tokens. With the pace `BURST`, the pacer pauses while
    `_WAITING` released tokens wait for `generate`.
    """

    def __init__(self, tokens: int) -> None:
        self.due = asyncio.Semaphore(0)
        self.closed = False
        self._left = tokens
        self._waiting = 0

    def takes(self) -> bool:
        return self.closed or self._waiting < _WAITING

    def emit(self) -> bool:
        if self.closed:
            return False
        self._left -= 1
        self._waiting += 1
        self.due.release()
        return self._left > 0

    def on_taken(self) -> None:
        self._waiting -= 1


class DynamoWorker:
    """The endpoint that Dynamo's frontend calls. Create the object inside the event loop."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._pacer = Pacer()

    async def generate(self, request: Any, context: Context) -> AsyncIterator[dict[str, Any]]:
        tokens = request["stop_conditions"]["max_tokens"]
        answer = ScriptedAnswer(tokens)
        self._log.began(context.id(), tokens)
        stopped = None
        if self._log.follows(context.id()):
            stopped = asyncio.ensure_future(self._note_stop(context))
        self._pacer.add(answer, request["sampling_options"]["seed"] or 0)
        try:
            for left in range(tokens - 1, -1, -1):
                await answer.due.acquire()
                answer.on_taken()
                self._pacer.wake()
                yield {"token_ids": [TOKEN]} | ({} if left else {"finish_reason": "length"})
        finally:
            answer.closed = True
            if stopped is not None:
                stopped.cancel()

    async def _note_stop(self, context: Context) -> None:
        await context.async_killed_or_stopped()
        self._log.note(context.id(), "stop")


async def run(model: Path, name: str, events: Path | None) -> None:
    """Register a worker for the model `name`, and serve its requests until cancelled."""
    runtime = DistributedRuntime(asyncio.get_running_loop(), "file", "tcp")
    endpoint = runtime.endpoint("bench.backend.generate")
    worker = DynamoWorker(Log(events.open("a") if events else None))
    config = ModelRuntimeConfig()
    config.context_length = _CONTEXT_LENGTH
    registered = register_model(
        ModelInput.Tokens,
        ModelType.Chat,
        endpoint,
        str(model),
        name,
        worker_type=WorkerType.Aggregated,
        runtime_config=config,
    )
    await asyncio.gather(registered, endpoint.serve_endpoint(worker.generate))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--events", type=Path)
    options = parser.parse_args()
    uvloop.run(run(options.model, options.name, options.events))


if __name__ == "__main__":
    main()

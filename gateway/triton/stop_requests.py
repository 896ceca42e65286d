"""Stop requests, repeated until the engine has stopped the request.

A stop for an id that the engine does not know is answered like any other, and forgotten. It does
not know the id while an ensemble tokenizes the prompt, nor while Triton still reads a request with
100 MB of adapter weights: a request on another stream overtakes it.

See decision 006 in docs/decisions.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging

from gateway.errors import GatewayError
from gateway.stops import EarlyStop
from gateway.triton.client import TritonClient
from gateway.triton.model_capabilities import ModelCapabilities
from gateway.triton.request import InferRequest

log = logging.getLogger(__name__)

_ANSWER_TIMEOUT_S = 2.0
# Pauses between repetitions. The engine has stopped a known request by then, also if many are
# abandoned at once.
_PAUSES_S = (0.25, 0.5, 1.0)
# A request that was started before the reset is known to the core model after this time.
_AFTER_RESET_S = 0.5


class StopRequests:
    """The stop requests to one Triton, each in a task of its own, safe from its caller's
    cancellation."""

    def __init__(self, client: TritonClient) -> None:
        self._client = client
        self._tasks: set[asyncio.Task[None]] = set()

    def send(self, request: InferRequest, stopping: EarlyStop, model: ModelCapabilities) -> None:
        """Send a stop request now, and a few times more until `stopping` ends. `model` is the one
        to stop."""
        task = asyncio.get_running_loop().create_task(self._stop(request.data, stopping, model))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _stop(self, request: bytes, stopping: EarlyStop, model: ModelCapabilities) -> None:
        over = asyncio.Event()
        stopping.add_listener(lambda _: over.set())
        await self._send(request)
        if model.llmapi is not None:
            return  # one model takes both in order, and TensorRT-LLM 1.2 never ends the other
        for pause_s in _PAUSES_S:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await over.wait()
            if over.is_set():
                break
            await self._send(request)
        if model.text is not None:
            # At the latest the reset ends the stream, but it does not reach a running step of an
            # ensemble.
            await over.wait()
            if stopping.seconds is None:
                await asyncio.sleep(_AFTER_RESET_S)
                await self._send(request)

    async def _send(self, request: bytes) -> None:
        try:
            async with asyncio.timeout(_ANSWER_TIMEOUT_S):
                stream = await self._client.infer(request)
                while await stream.read() is not None:
                    pass
        except (GatewayError, TimeoutError) as error:
            # Triton is unavailable or stuck; only the reset of the RPC is left.
            log.warning("stop request not answered: %s", error or "timeout")

    async def close(self) -> None:
        """Wait a moment for the running ones."""
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=_ANSWER_TIMEOUT_S)
            for task in late:
                task.cancel()

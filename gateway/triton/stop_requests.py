"""Stop requests: the engine is told again as long as what it is to stop goes on.

A stop for an id that the engine does not know is answered as any other, and forgotten. It does not
know the id while an ensemble tokenizes the prompt, nor while Triton still reads a request with 100
MB of an adapter's weights: what comes on another stream overtakes it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging

from gateway.errors import GatewayError
from gateway.stops import EarlyStop
from gateway.triton.client import TritonClient
from gateway.triton.model_capabilities import ModelCapabilities
from gateway.triton.request import Request

log = logging.getLogger(__name__)

_ANSWERED_WITHIN_S = 2.0
# Between one and the next. What the engine knows is over by then, also where many are left at once.
_PAUSES_S = (0.25, 0.5, 1.0)
# What was begun when the reset came, the core model knows by then.
_BEHIND_RESET_S = 0.5


class StopRequests:
    """Those to one Triton, each in a task of its own, out of reach of its caller's cancellation."""

    def __init__(self, client: TritonClient) -> None:
        self._client = client
        self._tasks: set[asyncio.Task[None]] = set()

    def send(self, request: Request, stopping: EarlyStop, model: ModelCapabilities) -> None:
        """Now, and a few times more if `stopping` is not over. `model` is what is to stop."""
        task = asyncio.get_running_loop().create_task(self._tell(request.data, stopping, model))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _tell(self, request: bytes, stopping: EarlyStop, model: ModelCapabilities) -> None:
        over = asyncio.Event()
        stopping.add_listener(lambda _: over.set())
        await self._send(request)
        if model.llmapi is not None:
            return  # one model takes both in their order, and TensorRT-LLM 1.2 never ends the other
        for pause_s in _PAUSES_S:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await over.wait()
            if over.is_set():
                break
            await self._send(request)
        if model.text is not None:
            # The reset comes at the latest, which reaches no step of an ensemble that runs.
            await over.wait()
            if stopping.seconds is None:
                await asyncio.sleep(_BEHIND_RESET_S)
                await self._send(request)

    async def _send(self, request: bytes) -> None:
        try:
            async with asyncio.timeout(_ANSWERED_WITHIN_S):
                stream = await self._client.infer(request)
                while await stream.read() is not None:
                    pass
        except (GatewayError, TimeoutError) as error:
            # Triton is away or stuck; the reset of the RPC is all that is left to say.
            log.warning("stop request not answered: %s", error or "timeout")

    async def close(self) -> None:
        """Gives those under way a moment."""
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=_ANSWERED_WITHIN_S)
            for task in late:
                task.cancel()

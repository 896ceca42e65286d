"""Stop requests, repeated until the engine has stopped the request.

The engine answers a stop request for an unknown id like any other, and forgets it. An id is still
unknown while an ensemble tokenizes the prompt, or while Triton reads a request with 100 MB of
adapter weights: the stop request is on another stream and overtakes that request.

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
# Pauses before repetitions. They give the engine time to stop a request that it knows, even if many
# requests are abandoned at once.
_PAUSES_S = (0.25, 0.5, 1.0)
# Pause before the last stop request. If a step of an ensemble was running at the reset of the
# stream, the core model gets the request within this time.
_AFTER_RESET_S = 0.5


class StopRequests:
    """Sender of the stop requests to one Triton.

    Each stop request has a task of its own, which is not cancelled with its caller.
    """

    def __init__(self, client: TritonClient) -> None:
        self._client = client
        self._tasks: set[asyncio.Task[None]] = set()

    def send(self, request: InferRequest, stopping: EarlyStop, model: ModelCapabilities) -> None:
        """Send the stop request `request` now, and a few times more until `stopping` is over.

        `model` is the model whose request is to be stopped.
        """
        task = asyncio.get_running_loop().create_task(self._stop(request.data, stopping, model))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _stop(self, request: bytes, stopping: EarlyStop, model: ModelCapabilities) -> None:
        over = asyncio.Event()
        stopping.add_listener(lambda _: over.set())
        await self._send(request)
        # An llmapi model needs no repetition: it takes the request and its stop request in order.
        # Also, `stopping` may not end: TensorRT-LLM 1.2 never ends the stream of the request.
        if model.llmapi is not None:
            return
        for pause_s in _PAUSES_S:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await over.wait()
            if over.is_set():
                break
            await self._send(request)
        if model.text is not None:
            # The stream ends at its reset at the latest. The reset does not stop a running step of
            # an ensemble, so the core model may get the request afterwards: stop it once more.
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
            # Triton is unavailable or stuck. Only the reset of the request's stream can still help.
            log.warning("stop request not answered: %s", error or "timeout")

    async def close(self) -> None:
        """Wait for running stop requests for `_ANSWER_TIMEOUT_S` at most, then cancel them."""
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=_ANSWER_TIMEOUT_S)
            for task in late:
                task.cancel()

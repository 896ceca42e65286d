"""Sending of stop requests, which are repeated until the engine has stopped the generation.

An engine ignores a stop request for an unknown request id, without an error. The id is still
unknown while an ensemble tokenizes the prompt, or while Triton reads a request with 100 MB of
adapter weights. A stop request is sent on another stream, so it can overtake the request.

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
# Pauses in seconds before the stop request is repeated. In this time, the engine can stop a request
# that it knows, even if many requests are aborted at the same time.
_PAUSES_S = (0.25, 0.5, 1.0)
# Pause in seconds between the reset of the stopped request's stream and the last stop request. In
# this time, a running ensemble passes the request to the core model.
_AFTER_RESET_S = 0.5


class StopRequests:
    """Sender of stop requests to one Triton server.

    Each stop request has its own task, which continues if the caller is cancelled.
    """

    def __init__(self, client: TritonClient) -> None:
        self._client = client
        self._tasks: set[asyncio.Task[None]] = set()

    def send(self, request: InferRequest, stopping: EarlyStop, model: ModelCapabilities) -> None:
        """Send a stop request in a new task.

        Repeat the stop request until the stopped request has ended, at most a few times. Send it
        only once to an llmapi model.

        Args:
            request: the stop request.
            stopping: reports when the engine has released the stopped request.
            model: capabilities of the model that runs the request that should be stopped.
        """
        task = asyncio.get_running_loop().create_task(self._stop(request.data, stopping, model))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _stop(self, request: bytes, stopping: EarlyStop, model: ModelCapabilities) -> None:
        over = asyncio.Event()
        stopping.add_listener(lambda _: over.set())
        await self._send(request)
        # Send only one stop request to an llmapi model. This model processes a request and its stop
        # request in order, so the stop request cannot come too early. Besides, the end of the
        # stopped request may never be reported, because TensorRT-LLM 1.2 does not end its stream.
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
            # Wait until the stopped request's stream has ended or was reset. After a reset, a
            # running ensemble may still pass this request to the core model. So send the stop
            # request once more.
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
            # Only log the failure. Triton does not answer, so the stream of the stopped request
            # will be reset.
            log.warning("stop request not answered: %s", error or "timeout")

    async def close(self) -> None:
        """Wait up to `_ANSWER_TIMEOUT_S` seconds for running stop requests, then cancel them."""
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=_ANSWER_TIMEOUT_S)
            for task in late:
                task.cancel()

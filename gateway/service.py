"""The state of one gateway process, built in one place and passed to whoever needs it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from gateway.lora import Adapters
from gateway.prompt import Prompts
from gateway.routing import Router
from gateway.settings import Settings
from gateway.telemetry import Metrics
from gateway.triton.engine import Engine


@dataclass(frozen=True, slots=True)
class Service:
    settings: Settings
    prompts: Prompts
    engine: Engine
    adapters: Adapters
    router: Router
    metrics: Metrics
    created: int
    """Unix time for `/v1/models`: when the tokenizer was written, equal on every replica."""
    started: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once the adapters of the configuration are registered."""

    async def run(self) -> None:
        """Keeps the engine's state true and registers the configured adapters; until cancelled."""
        watch = asyncio.create_task(self.engine.watch())
        try:
            await self.engine.wait_ready()
            await self.adapters.register_configured()
            self.started.set()
            await watch
        finally:
            watch.cancel()


@asynccontextmanager
async def running_service(settings: Settings) -> AsyncIterator[Service]:
    """A service that is at work while the context is open."""
    metrics = Metrics()
    created = int(os.stat(settings.tokenizer_dir).st_mtime)
    prompts = Prompts.load(settings.tokenizer_dir, settings.tool_form)
    engine = Engine(
        settings.triton_grpc,
        settings.triton_model,
        vocab_size=prompts.vocab_size,
        max_seq_len=settings.max_seq_len,
        on_stop=metrics.count_stop,
        on_cold_send=metrics.count_cold_send,
    )
    try:
        async with Adapters(settings, lambda: engine.dialect) as adapters:
            router = Router(settings.model_name, adapters)
            metrics.export_lora(adapters, engine.residency)
            service = Service(settings, prompts, engine, adapters, router, metrics, created)
            # One look before the port opens: with Triton up, the first request is served.
            await engine.refresh()
            work = asyncio.create_task(service.run())
            try:
                yield service
            finally:
                work.cancel()
                await asyncio.wait([work])
    finally:
        await engine.close()
        prompts.close()

"""What lives as long as a gateway process, passed to whoever needs it; `service_setup` makes it."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gateway.catalog.adapters import AdapterCatalog
from gateway.catalog.declared import DeclaredAdapters
from gateway.catalog.mapped import MappedModels, MappedRouter
from gateway.catalog.router import ModelRouter
from gateway.catalog.shortfall import find_shortfalls
from gateway.config.file import ConfigurationFile
from gateway.config.mapped import EmbeddingModel, RerankModel
from gateway.config.settings import Settings
from gateway.conversations.store import Conversations
from gateway.errors import EngineUnavailable, GatewayError
from gateway.guiding.check import GuideCheck
from gateway.metrics.metrics import Metrics
from gateway.monitor.monitor import Monitor
from gateway.overrides.followed import FollowedOverrides
from gateway.replica_setup import guessed, targets_of
from gateway.scheduling.adapter_wait import AdapterWait
from gateway.scheduling.admission import Admission
from gateway.scheduling.mapped_pool import MappedPool
from gateway.scheduling.replicas import Replicas
from gateway.scheduling.start_queue import StartQueue
from gateway.tenancy.access import Access
from gateway.tenancy.accounting import Accounting
from gateway.tenancy.keys.issued import IssuedKeys
from gateway.tenancy.unknown_models import UnknownModels
from gateway.tokenization.prompts import Prompts
from gateway.tokenization.turns import TurnThread
from gateway.troubles import Troubles

if TYPE_CHECKING:
    from gateway.observability.tracing import Tracer

log = logging.getLogger(__name__)

_TICK_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    settings: Settings
    prompts: Prompts
    replicas: Replicas
    overrides: FollowedOverrides
    """What admins say of replicas, beside the configuration."""
    admission: Admission
    starts: StartQueue
    """The queue of requests before the event loop of this process, which nothing was done for."""
    bodies: Admission
    """Whose turn it is to have a large body here; a place is a byte."""
    histories: Admission
    """Likewise, a large one of what was kept. Who waits for it may keep those waiting who have a
    body here, so it is no room of theirs."""
    adapter_wait: AdapterWait
    """Where requests wait for a replica that has their adapter on its disk."""
    cold_sends: Admission
    """Whose turn it is to have an adapter read and sent to Triton; a place is a byte."""
    guides: GuideCheck
    logits: TurnThread
    """Where the likeliest tokens are found and many numbers written, in turn by tenant."""
    adapters: AdapterCatalog
    mapped: MappedModels
    embedders: MappedRouter[EmbeddingModel]
    rankers: MappedRouter[RerankModel]
    mapped_pool: MappedPool
    vectors: Admission
    """Whose turn it is to have many numbers of an answer here; a place is a byte."""
    declared: DeclaredAdapters
    router: ModelRouter
    troubles: Troubles
    """Conditions that hold now; `conditions` finds most of them."""
    unknown_models: UnknownModels
    metrics: Metrics
    monitor: Monitor
    configuration: ConfigurationFile
    access: Access
    keys: IssuedKeys | None
    """Those made over the API; None where there can be no tenants."""
    accounting: Accounting
    conversations: Conversations
    created: int
    """Unix time for `/v1/models`: when the tokenizer was written, equal on every replica."""
    tracer: Tracer | None
    started: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once the adapters of the configuration are registered."""
    failed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when `run` has ended by a mistake of ours: what is known is not kept true any more."""

    @property
    def warning(self) -> str | None:
        """What is amiss with what is driven. Raises EngineUnavailable while nothing is ready."""
        selections = self.replicas.selections
        ready = [replica.engine for replica in self.replicas if replica.ready]
        of_models = [engine.selection.warning for engine in ready]
        of_places = [guessed(self.settings, selection.capabilities) for selection in selections]
        return "; ".join(dict.fromkeys([each for each in of_models + of_places if each])) or None

    @property
    def shortfalls(self) -> list[str]:
        """What disks of replicas lack, in words for operators."""
        return find_shortfalls(self.adapters.placement, self.disks())

    def placement(self, weights: str) -> dict[str, str]:
        """By endpoint of what reads adapters from its disk, what is known of these weights."""
        return {
            endpoint: self.adapters.placement.state(weights, endpoint)
            for endpoint, reads in self.disks().items()
            if reads
        }

    def disks(self) -> dict[str, bool]:
        """By the endpoint of each replica, whether it reads adapters from its own disk now."""
        return {
            replica.endpoint: replica.ready and replica.engine.capabilities.reads_adapters
            for replica in self.replicas
        }

    async def run(self) -> None:
        """Keeps the engine's state true and registers the configured adapters; until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._look_after_replicas())
            tasks.create_task(self.configuration.watch(self.troubles))
            tasks.create_task(self.monitor.follow(self.troubles))
            tasks.create_task(self.overrides.follow(self.troubles))
            tasks.create_task(self.accounting.record_usage())
            tasks.create_task(self.conversations.follow())
            tasks.create_task(self.adapters.follow_disks(self.disks, self.troubles))
            if self.keys is not None:
                tasks.create_task(self.keys.follow())
            await self.replicas.wait_ready()
            self._warn_of_guess()
            while not self.started.is_set():
                try:
                    await self.adapters.register_configured()
                except GatewayError as error:  # Triton went away in between
                    text = f"adapters are not registered yet: {error.message}"
                    self.troubles.hold("registration", logging.WARNING, text)
                    await asyncio.sleep(_TICK_S)
                else:
                    self.troubles.clear("registration")
                    self.started.set()
            await self.declared.follow(self.troubles)

    def _warn_of_guess(self) -> None:
        with suppress(EngineUnavailable):  # it went away in between; /health/ready tells it too
            for capabilities in self.replicas.capabilities:
                if (warning := guessed(self.settings, capabilities)) is not None:
                    log.warning("%s", warning)

    def ended(self, work: asyncio.Task[None]) -> None:
        """To be told of the end of `run`."""
        if not work.cancelled() and (error := work.exception()) is not None:
            log.critical("the gateway cannot go on", exc_info=error)
            self.failed.set()

    async def _look_after_replicas(self) -> None:
        """Makes them what the configuration says, and hands out places that have come free."""
        while True:
            try:
                targets = targets_of(self.settings, self.configuration.current)
                if targets != self.replicas.configured:
                    await self.replicas.configure(targets)
            except Exception as error:  # whatever is wrong with one, this must go on looking
                text = f"the replicas could not be changed: {error!r}"
                self.troubles.hold("replicas", logging.ERROR, text, exc_info=True)
            else:
                self.troubles.clear("replicas")
            self.admission.grant_free_slots()
            await asyncio.sleep(_TICK_S)

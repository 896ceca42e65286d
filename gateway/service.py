"""Objects that exist once per gateway process. `gateway.service_setup` creates these objects."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gateway.catalog.adapters import AdapterCatalog
from gateway.catalog.administration import AdapterAdmin
from gateway.catalog.declared import DeclaredAdapters
from gateway.catalog.mapped import MappedModels, MappedRouter
from gateway.catalog.router import ModelRouter
from gateway.catalog.shortfall import find_shortfalls
from gateway.config.file import ConfigurationFile
from gateway.config.mapped import EmbeddingModel, RerankModel
from gateway.config.settings import Settings
from gateway.conversations.store import Conversations
from gateway.database.changes import ChangeFeed
from gateway.database.database import Database
from gateway.database.sharing import Sharing
from gateway.errors import EngineUnavailable, GatewayError
from gateway.guiding.check import GuideCheck
from gateway.metrics.metrics import Metrics
from gateway.monitor.monitor import Monitor
from gateway.overrides.live import LiveOverrides
from gateway.replica_setup import describe_in_flight_guess, list_targets
from gateway.scheduling.adapter_wait import AdapterWait
from gateway.scheduling.engine_queue import EngineQueue
from gateway.scheduling.fair_budget import FairBudget
from gateway.scheduling.mapped_pool import MappedPool
from gateway.scheduling.replicas import Replicas
from gateway.scheduling.start_queue import StartQueue
from gateway.tenancy.access import Access
from gateway.tenancy.accounting import Accounting
from gateway.tenancy.keys.issued import IssuedKeys
from gateway.tenancy.limits.totals import BudgetTotals
from gateway.tenancy.unknown_models import UnknownModels
from gateway.tenancy.usage_rows import UsageRows
from gateway.tokenization.prompts import Prompts
from gateway.tokenization.threads import FairThread
from gateway.troubles import Troubles

if TYPE_CHECKING:
    from gateway.observability.tracing import Tracer

log = logging.getLogger(__name__)

_TICK_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """The shared objects of a gateway process, passed to the code that needs them."""

    settings: Settings
    database: Database
    sharing: Sharing
    """Answer to the question if all gateways that share the Redis also share the database."""
    changes: ChangeFeed
    """Poller that makes `keys` and `overrides` follow the database."""
    prompts: Prompts
    replicas: Replicas
    overrides: LiveOverrides
    """Weights and drains that admins set over the API. They override the configuration."""
    admission: EngineQueue
    starts: StartQueue
    """Queue of requests that have not started because the event loop is busy."""
    body_budget: FairBudget
    """Byte budget for buffered request bodies (fair by tenant)."""
    history_budget: FairBudget
    """Byte budget for stored conversations that are read into memory (fair by tenant).

    This budget is separate from `body_budget` to avoid a deadlock: requests that hold bytes for
    their bodies would block each other while they wait for bytes for their conversations.
    """
    adapter_wait: AdapterWait
    """Queue of requests whose adapter is not on the disk of any replica yet."""
    upload_budget: FairBudget
    """Byte budget for adapter weights that are read and uploaded to Triton (fair by tenant)."""
    guides: GuideCheck
    logits: FairThread
    """Thread that computes log probabilities and serializes large responses (fair by tenant)."""
    adapters: AdapterCatalog
    adapter_admin: AdapterAdmin
    mapped: MappedModels
    embedders: MappedRouter[EmbeddingModel]
    rankers: MappedRouter[RerankModel]
    mapped_pool: MappedPool
    vector_budget: FairBudget
    """Byte budget for large responses with embeddings (fair by tenant)."""
    declared: DeclaredAdapters
    router: ModelRouter
    troubles: Troubles
    """Current problems, for logs and health checks; `gateway.conditions` detects most of them."""
    unknown_models: UnknownModels
    metrics: Metrics
    monitor: Monitor
    configuration: ConfigurationFile
    access: Access
    keys: IssuedKeys | None
    """Keys created over the API; None without a configuration file, which defines the tenants."""
    accounting: Accounting
    budget_totals: BudgetTotals
    """Usage of budgets in the database, at which Redis continues if it has lost its data."""
    usage_rows: UsageRows | None
    """Writer of usage records to the database; None without GATEWAY_USAGE_ROWS_DAYS."""
    conversations: Conversations
    created: int
    """Value of `created` in `/v1/models`: modification time of the tokenizer folder, Unix time.

    This time is the same on all gateways.
    """
    tracer: Tracer | None
    started: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the adapters of the configuration are registered."""
    failed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when `run` has failed because of a bug. All background tasks have then ended."""

    @property
    def warning(self) -> str | None:
        """Warnings about the models of ready replicas and about guessed settings, as one text.

        None if there are no warnings.

        Raise EngineUnavailable if no replica is ready.
        """
        selections = self.replicas.selections
        ready = [replica.engine for replica in self.replicas if replica.ready]
        of_models = [engine.selection.warning for engine in ready]
        of_places = [
            describe_in_flight_guess(self.settings, selection.capabilities)
            for selection in selections
        ]
        return "; ".join(dict.fromkeys([each for each in of_models + of_places if each])) or None

    @property
    def shortfalls(self) -> list[str]:
        """Messages for operators about adapter versions that are missing on replicas' disks."""
        return find_shortfalls(self.adapters.disks.placement, self.list_disks())

    def get_placement(self, weights: str) -> dict[str, str]:
        """Return the state of an adapter version on each replica's disk, by the replica's endpoint.

        Only replicas that read adapters from their disks are included. `weights` is the digest of
        the version's weights. `Placement.state` defines the states.
        """
        return {
            endpoint: self.adapters.disks.placement.state(weights, endpoint)
            for endpoint, reads in self.list_disks().items()
            if reads
        }

    def list_disks(self) -> dict[str, bool]:
        """Return which replicas read adapters from their disks: True or False, by endpoint.

        The value is False while a replica is not ready.
        """
        return {
            replica.endpoint: replica.ready and replica.engine.capabilities.reads_adapters
            for replica in self.replicas
        }

    async def run(self) -> None:
        """Run the background tasks and register the configured adapters, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._reconcile_replicas())
            tasks.create_task(self.configuration.watch(self.troubles))
            tasks.create_task(self.monitor.follow(self.troubles))
            tasks.create_task(self.sharing.follow(self.troubles))
            tasks.create_task(self.changes.follow(self.troubles))
            tasks.create_task(self.accounting.record_usage())
            tasks.create_task(self.budget_totals.follow(self.troubles))
            tasks.create_task(self.conversations.follow())
            tasks.create_task(self.adapters.disks.follow(self.list_disks, self.troubles))
            if self.usage_rows is not None:
                tasks.create_task(self.usage_rows.follow(self.troubles))
            if self.keys is not None:
                tasks.create_task(self.keys.follow(self.troubles))
            await self.replicas.wait_ready()
            self._warn_of_guessed_settings()
            while not self.started.is_set():
                try:
                    await self.adapter_admin.register_configured()
                except GatewayError as error:  # Triton has become unavailable since `wait_ready`
                    text = f"adapters are not registered yet: {error.message}"
                    self.troubles.hold("registration", logging.WARNING, text)
                    await asyncio.sleep(_TICK_S)
                else:
                    self.troubles.clear("registration")
                    self.started.set()
            await self.declared.follow(self.troubles)

    def _warn_of_guessed_settings(self) -> None:
        # Ignore EngineUnavailable: Triton may have become unavailable meanwhile. /health/ready also
        # reports the warning.
        with suppress(EngineUnavailable):
            for capabilities in self.replicas.capabilities:
                if (warning := describe_in_flight_guess(self.settings, capabilities)) is not None:
                    log.warning("%s", warning)

    def on_run_end(self, work: asyncio.Task[None]) -> None:
        """Log a failure of `run`, and set `failed`. Done callback of the task that runs `run`."""
        if not work.cancelled() and (error := work.exception()) is not None:
            log.critical("the gateway cannot continue", exc_info=error)
            self.failed.set()

    async def _reconcile_replicas(self) -> None:
        """Apply configuration changes to the replicas. Run until cancelled.

        Also give slots to queued requests when slots have become free.
        """
        while True:
            try:
                targets = list_targets(self.settings, self.configuration.current)
                if targets != self.replicas.configured:
                    await self.replicas.configure(targets)
            except Exception as error:  # do not end the loop because of one bad replica
                text = f"the replicas could not be changed: {error!r}"
                self.troubles.hold("replicas", logging.ERROR, text, exc_info=True)
            else:
                self.troubles.clear("replicas")
            self.admission.grant_free_slots()
            await asyncio.sleep(_TICK_S)

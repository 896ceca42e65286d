"""Prometheus collectors for values that other components of the gateway already store.

A collector reads these values only when Prometheus scrapes, so they need not be counted twice.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import fields

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from gateway.catalog.adapters import AdapterCatalog
from gateway.catalog.declared import DeclaredAdapters
from gateway.catalog.engine_fit import EngineFit
from gateway.config.file import ConfigurationFile
from gateway.conversations.stats import ConversationStats
from gateway.database.database import Database
from gateway.scheduling.engine_queue import EngineQueue
from gateway.scheduling.replica import Replica
from gateway.scheduling.start_queue import StartQueue
from gateway.tenancy.limits.budgets import BudgetUsage

_STATES = {"redis_up", "memory_bytes", "unsent", "unwritten"}
"""Fields of `StoreStats` that are exported as gauges, because they can decrease.

All other fields are exported as counters.
"""


class LoraCollector(Collector):
    """Collector for the metrics of LoRA adapters.

    The metrics are the number of adapters that each replica has or lacks on its disk, statistics of
    the adapter store, and `lora_requests_info`. The scheduler of the Gateway API Inference
    Extension reads `lora_requests_info`. For a request with an adapter, it prefers gateways that
    already use this adapter.
    """

    def __init__(
        self, adapters: AdapterCatalog, fit: EngineFit, replicas: Iterable[Replica]
    ) -> None:
        self._adapters = adapters
        self._fit = fit
        self._replicas = replicas

    def collect(self) -> Iterator[Metric]:
        fit = self._fit.compute_cache_fit()
        info = GaugeMetricFamily(
            "lora_requests_info",
            "Adapters with running and waiting requests; the value is the time of the reading.",
            labels=["running_lora_adapters", "waiting_lora_adapters", "max_lora"],
        )
        residencies = [replica.engine.residency for replica in self._replicas]
        running = self._names(residency.budget.active for residency in residencies)
        labels = [
            ",".join(sorted({*running.split(","), *self._adapters.names_in_use} - {""})),
            self._names(residency.budget.waiting for residency in residencies),
            str(fit.host_adapters if fit else 0),
        ]
        info.add_metric(labels, time.time())
        yield info
        held = GaugeMetricFamily(
            "gateway_replica_adapters",
            "Adapter versions that a replica has on its disk, of those that read them from there.",
            labels=["replica"],
        )
        lacking = GaugeMetricFamily(
            "gateway_replica_adapters_lacking",
            "Adapter versions that it cannot have there now; /health/ready has the reasons.",
            labels=["replica"],
        )
        placement = self._adapters.disks.placement
        for replica in self._replicas:
            if replica.ready and replica.engine.capabilities.reads_adapters:
                held.add_metric([replica.endpoint], placement.count(replica.endpoint))
                lacks = placement.count_lacking(replica.endpoint).total()
                lacking.add_metric([replica.endpoint], lacks)
        yield from (held, lacking)
        stats = self._adapters.store.stats
        for field in fields(stats):
            value = getattr(stats, field.name)
            name = f"gateway_adapter_store_{field.name}"
            if field.name in _STATES:
                yield GaugeMetricFamily(name, "State of the adapter store.", float(value))
            else:
                yield CounterMetricFamily(name, "Events in the adapter store.", value)

    def _names(self, task_ids: Iterable[frozenset[int]]) -> str:
        ids = frozenset[int]().union(*task_ids)
        return ",".join(sorted({self._adapters.name_of(task_id) for task_id in ids}))


class ConversationsCollector(Collector):
    def __init__(self, stats: ConversationStats) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        stats, prefix = self._stats, "gateway_conversations"
        yield GaugeMetricFamily(
            f"{prefix}_bytes",
            "Bytes of responses and conversations on this gateway's disk, at the worker that looks "
            "after it.",
            stats.bytes,
        )
        yield GaugeMetricFamily(f"{prefix}_records", "Records of them.", stats.records)
        yield CounterMetricFamily(
            f"{prefix}_evicted",
            "Records removed from the disk or Redis before their time, for the bytes of a tenant.",
            stats.evicted,
        )
        failures = CounterMetricFamily(
            f"{prefix}_failures",
            "Failures of the disk and Redis, and invalid values in Redis.",
            labels=["of"],
        )
        failures.add_metric(["disk"], stats.disk_failures)
        failures.add_metric(["redis"], stats.redis_failures)
        failures.add_metric(["value"], stats.refused_values)
        yield failures


class DatabaseCollector(Collector):
    def __init__(self, database: Database) -> None:
        self._database = database

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily(
            "gateway_database_up",
            "1 while the database works: its last call has succeeded.",
            float(not self._database.problem),
        )
        yield CounterMetricFamily(
            "gateway_database_failures", "Failed calls of the database.", self._database.failures
        )


class DeclaredCollector(Collector):
    def __init__(self, declared: DeclaredAdapters) -> None:
        self._declared = declared

    def collect(self) -> Iterator[Metric]:
        found = GaugeMetricFamily(
            "gateway_declared_adapters",
            "Adapters of the configuration file by state (waiting, loaded, failed), at the process "
            "that looks after them.",
            labels=["state"],
        )
        for state, count in self._declared.counts().items():
            found.add_metric([state], count)
        yield found


class BudgetCollector(Collector):
    def __init__(self, configuration: ConfigurationFile, standings: BudgetUsage) -> None:
        self._configuration = configuration
        self._standings = standings

    def collect(self) -> Iterator[Metric]:
        budget = GaugeMetricFamily(
            "gateway_tenant_budget_tokens",
            "Tokens that a tenant may use in a day or month.",
            labels=["tenant", "limit"],
        )
        used = GaugeMetricFamily(
            "gateway_tenant_budget_used_tokens",
            "Tokens that all gateways have counted in this period, as far as this process knows: "
            "the greatest of all is true.",
            labels=["tenant", "limit"],
        )
        for tenant in self._configuration.current.tenants or ():
            for name, limit in tenant.budgets.items():
                budget.add_metric([tenant.name, name], limit)
                if (known := self._standings.used_of(tenant.name, name)) is not None:
                    used.add_metric([tenant.name, name], known)
        yield from (budget, used)


class LoadCollector(Collector):
    def __init__(
        self, admission: EngineQueue, starts: StartQueue, replicas: Iterable[Replica]
    ) -> None:
        self._admission = admission
        self._starts = starts
        self._replicas = replicas

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily(
            "gateway_places_taken", "Slots of the engines in use.", self._admission.in_flight
        )
        yield GaugeMetricFamily(
            "gateway_requests_waiting",
            "Requests that wait for their turn.",
            self._admission.waiting,
        )
        yield GaugeMetricFamily(
            "gateway_requests_waiting_to_begin",
            "Requests that wait for the gateway's own core, before anything is done for them.",
            self._starts.waiting,
        )
        ready = GaugeMetricFamily(
            "gateway_replica_ready", "1 while the replica serves the model.", labels=["replica"]
        )
        failing = GaugeMetricFamily(
            "gateway_replica_failing",
            "1 while the replica gets no requests after failures.",
            labels=["replica"],
        )
        in_flight = GaugeMetricFamily(
            "gateway_replica_in_flight", "Requests on the replica.", labels=["replica"]
        )
        weight = GaugeMetricFamily(
            "gateway_replica_weight",
            "Share of the requests, by the weights of all; 0 where it is drained.",
            labels=["replica"],
        )
        requests = CounterMetricFamily(
            "gateway_replica_requests",
            "Requests that were sent to the replica.",
            labels=["replica"],
        )
        for replica in {replica.endpoint: replica for replica in self._replicas}.values():
            ready.add_metric([replica.endpoint], replica.ready)
            failing.add_metric([replica.endpoint], not replica.breaker.allows)
            in_flight.add_metric([replica.endpoint], replica.in_flight)
            weight.add_metric([replica.endpoint], replica.weight if replica.accepts_new else 0)
            requests.add_metric([replica.endpoint], replica.requests)
        yield from (ready, failing, in_flight, weight, requests)

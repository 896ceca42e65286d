"""Prometheus metrics of one gateway process, and the methods that update them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from gateway.catalog.adapters import AdapterCatalog
from gateway.catalog.declared import DeclaredAdapters
from gateway.catalog.engine_fit import EngineFit
from gateway.config.file import ConfigurationFile
from gateway.conversations.stats import ConversationStats
from gateway.database.database import Database
from gateway.metrics.scraped import (
    BudgetCollector,
    ConversationsCollector,
    DatabaseCollector,
    DeclaredCollector,
    LoadCollector,
    LoraCollector,
)
from gateway.metrics.tallies import Histograms, Level, Tallies, Tally, Times
from gateway.scheduling.engine_queue import EngineQueue
from gateway.scheduling.replica import Replica
from gateway.scheduling.start_queue import StartQueue
from gateway.stops import EarlyStop
from gateway.tenancy.limits.budgets import BudgetUsage
from gateway.tenancy.usage_log import UsageRecord
from gateway.triton.events import AdapterUpload

# Some unknown parameter names get their own time series. These limits apply to the number of such
# names in a process, in a request, and of a tenant. Clients choose the names, so without limits the
# names could fill the memory.
_MAX_UNKNOWN_NAMES = 64
_MAX_NAMES_OF_REQUEST = 16
_MAX_NAMES_OF_TENANT = 16
_LIST_INDEX = re.compile(r"\[\d+\]|\.\d+(?=\.)")
_PLAIN_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.\-]{0,63}")
_STOP_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2)
_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


@dataclass(frozen=True, slots=True)
class ModelMetrics:
    """The metrics of the base model or of one adapter.

    `Metrics.for_model` caches the instances, because finding a metric by its labels takes longer
    than updating the metric.
    """

    prompt_tokens: Tally
    completion_tokens: Tally
    time_to_first_token: Times
    duration: Times


@dataclass(frozen=True, slots=True)
class MappedMetrics:
    """The metrics of one embedding or ranking model of the configuration file."""

    prompt_tokens: Tally
    inputs: Tally
    duration: Times


class Metrics:
    """Metrics of one process.

    Each instance has its own registry, instead of prometheus_client's global registry, so that
    several applications can run in one process.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Tallies(
            "gateway_requests_total",
            "Requests that have ended, by path and the status of their end, which the headers of a "
            "stream do not tell (499: the client left, or its own deadline passed, which it is "
            "told as 504).",
            ["path", "status"],
            self.registry,
        )
        self.in_flight = Level(
            "gateway_generations_in_flight",
            "Generations between request and last token.",
            self.registry,
        )
        self.keeps_words = Gauge(
            "gateway_tokenizer_keeps_words",
            "1 where the ids of prompts come from those of their words, 0 where the "
            "tokenizer is of another kind, or was found to differ.",
            registry=self.registry,
        )
        self.prompt_tokens = Tallies(
            "gateway_prompt_tokens_total", "Prompt tokens.", ["model"], self.registry
        )
        self.completion_tokens = Tallies(
            "gateway_completion_tokens_total", "Generated tokens.", ["model"], self.registry
        )
        self.time_to_first_token = Histograms(
            "gateway_time_to_first_token_seconds",
            "From the parsed request to the engine's first token.",
            ["model"],
            _SECONDS,
            self.registry,
        )
        self.duration = Histograms(
            "gateway_generation_seconds",
            "From the parsed request to its last token or its end.",
            ["model"],
            _SECONDS,
            self.registry,
        )
        self.inputs = Tallies(
            "gateway_inputs_total",
            "Texts that got an embedding and documents that got a score.",
            ["model"],
            self.registry,
        )
        self.inference = Histograms(
            "gateway_inference_seconds",
            "Of a request for embeddings or a ranking, from its tokens to the model's last answer.",
            ["model"],
            _SECONDS,
            self.registry,
        )
        self.stops = Counter(
            "gateway_stops_total",
            "Generations that were stopped in the engine, by reason.",
            ["reason"],
            registry=self.registry,
        )
        self.stop_seconds = Histogram(
            "gateway_stop_seconds",
            "From when a generation was to end early (its client left, a stop string came) until "
            "the engine had ended it, by reason.",
            ["reason"],
            buckets=_STOP_SECONDS,
            registry=self.registry,
        )
        self.stops_unseen = Counter(
            "gateway_stops_unseen_total",
            "Generations that were to end early and that the engine did not end in two seconds, or "
            "whose end was not seen, by reason.",
            ["reason"],
            registry=self.registry,
        )
        self.continued = Counter(
            "gateway_generations_continued_total",
            "Times that a generation was resumed at another replica: its own had failed, or was "
            "drained.",
            ["cause"],
            registry=self.registry,
        )
        self.continued_tokens = Counter(
            "gateway_generations_continued_tokens_total",
            "Tokens of prompts and answers that another replica was given for that; no tenant is "
            "charged for them.",
            registry=self.registry,
        )
        self.uploads = Counter(
            "gateway_lora_cold_sends_total",
            "Requests that carried LoRA weights, by adapter and cause.",
            ["adapter", "cause"],
            registry=self.registry,
        )
        self.upload_bytes = Counter(
            "gateway_lora_cold_send_bytes_total",
            "LoRA weights sent to the engine.",
            ["adapter"],
            registry=self.registry,
        )
        self.upload_seconds = Histogram(
            "gateway_lora_cold_send_seconds",
            "From the wish for an adapter's weights, their turn included, to the engine's first "
            "response.",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.engine_ready = Gauge(
            "gateway_engine_ready", "1 while Triton serves the core model.", registry=self.registry
        )

        self.rate_limited = Counter(
            "gateway_rate_limited_total",
            "Requests refused with 429, by tenant and limit.",
            ["tenant", "limit"],
            registry=self.registry,
        )
        self.queue_refusals = Counter(
            "gateway_queue_refusals_total",
            "Requests refused with 503 as they did not get their turn, by tenant and cause: "
            "queue_full, queue_timeout, expected_wait (at once), too_late (for its first token, "
            "when its turn had not come), core_busy (at once, for the gateway's own core; the "
            "tenant is empty for keys that are unknown).",
            ["tenant", "cause"],
            registry=self.registry,
        )
        self.tenant_requests = Counter(
            "gateway_tenant_requests_total",
            "Requests that were admitted, by tenant, model, adapter and status (499: the client "
            "left).",
            ["tenant", "model", "adapter", "status"],
            registry=self.registry,
        )
        self.tenant_tokens = Counter(
            "gateway_tenant_tokens_total",
            "Tokens as in the usage log, by tenant, model, adapter and kind; cached ones are among "
            "those of the prompt.",
            ["tenant", "model", "adapter", "kind"],
            registry=self.registry,
        )
        self.usage_lost = Counter(
            "gateway_usage_records_lost_total",
            "Usage records that could not be written.",
            registry=self.registry,
        )
        self.limits_refused = Counter(
            "gateway_limits_refused_values_total",
            "Tenants whose key in Redis holds an invalid value, which is not changed.",
            registry=self.registry,
        )
        self.limits_shared = Gauge(
            "gateway_limits_shared",
            "1 while limits are counted in Redis with the other gateways.",
            registry=self.registry,
        )
        self.limits_alone = Counter(
            "gateway_limits_alone_total",
            "Times that a request's limits were not counted in Redis, which was late or away.",
            registry=self.registry,
        )
        self.reloads = Counter(
            "gateway_configuration_reloads_total",
            "Times that the configuration file was read again, by outcome.",
            ["outcome"],
            registry=self.registry,
        )
        self.configuration_refused = Gauge(
            "gateway_configuration_refused",
            "1 while the configuration file is wrong and an older one is in force.",
            registry=self.registry,
        )
        self.unknown_parameters = Tallies(
            "gateway_unknown_parameters_total",
            "Parameters that this server does not know and that had no effect, by name; the first "
            "64 names of a process, 16 of a tenant, have series of their own, all else is `other`.",
            ["parameter"],
            self.registry,
        )
        self._unknown_names: dict[str, str] = {}
        """Unknown parameter names that have their own time series.

        The dictionary maps each name to the tenant that sent the parameter first.
        """
        self._models: dict[str, ModelMetrics] = {}

    def for_model(self, model: str) -> ModelMetrics:
        """Return the metrics of a model. `model` is the name of the base model or of an adapter."""
        metrics = self._models.get(model)
        if metrics is None:
            metrics = self._models[model] = ModelMetrics(
                self.prompt_tokens.labels(model),
                self.completion_tokens.labels(model),
                self.time_to_first_token.labels(model),
                self.duration.labels(model),
            )
        return metrics

    def for_mapped_model(self, model: str) -> MappedMetrics:
        """Return the metrics of an embedding or ranking model."""
        return MappedMetrics(
            self.prompt_tokens.labels(model),
            self.inputs.labels(model),
            self.inference.labels(model),
        )

    def export_lora(
        self, adapters: AdapterCatalog, fit: EngineFit, replicas: Iterable[Replica]
    ) -> None:
        """Export metrics of LoRA adapters. The values are read when Prometheus scrapes.

        The metrics are the names of the adapters of current requests, the number of adapters on
        each replica's disk, and the statistics of the adapter store.
        """
        self.registry.register(LoraCollector(adapters, fit, replicas))

    def export_declared(self, declared: DeclaredAdapters) -> None:
        """Export how many adapters of the configuration file are in each state.

        The states are "waiting", "loaded" and "failed". The values are read when Prometheus
        scrapes.
        """
        self.registry.register(DeclaredCollector(declared))

    def export_database(self, database: Database) -> None:
        """Export if the database works. The values are read when Prometheus scrapes."""
        self.registry.register(DatabaseCollector(database))

    def export_conversations(self, stats: ConversationStats) -> None:
        """Export the conversation store's statistics. They are read when Prometheus scrapes."""
        self.registry.register(ConversationsCollector(stats))

    def export_load(
        self, admission: EngineQueue, starts: StartQueue, replicas: Iterable[Replica]
    ) -> None:
        """Export the number of queued requests, and the load and availability of each replica.

        The values are read when Prometheus scrapes.
        """
        self.registry.register(LoadCollector(admission, starts, replicas))

    def export_budgets(self, configuration: ConfigurationFile, standings: BudgetUsage) -> None:
        """Export the usage of the tenants' budgets. The values are read when Prometheus scrapes."""
        self.registry.register(BudgetCollector(configuration, standings))

    def count_reload(self, applied: bool) -> None:
        self.reloads.labels("applied" if applied else "refused").inc()
        self.configuration_refused.set(not applied)

    def count_unknown_parameters(self, names: Sequence[str], tenant: str) -> None:
        """Count the unknown parameters of a request by name.

        A name that matches `_PLAIN_NAME` gets its own time series. The number of such names is
        limited per request, per tenant and per process. All other names are counted as `other`.
        """
        known = self._unknown_names
        for path in names[:_MAX_NAMES_OF_REQUEST]:
            # Drop list indices: `tools[0].x` and `tools[1].x` are the same parameter.
            name = _LIST_INDEX.sub("", path)
            if name not in known and self._can_add_name(tenant) and _PLAIN_NAME.fullmatch(name):
                known[name] = tenant
            self.unknown_parameters.labels(name if name in known else "other").inc()
        if others := len(names[_MAX_NAMES_OF_REQUEST:]):
            self.unknown_parameters.labels("other").inc(others)

    def _can_add_name(self, tenant: str) -> bool:
        """Return True if one more parameter name of this tenant may get its own time series."""
        tenants = [*self._unknown_names.values()]
        # On a gateway without tenants, `tenant` is always "". Only the limit for the process then
        # applies.
        max_names = _MAX_NAMES_OF_TENANT if tenant else _MAX_UNKNOWN_NAMES
        return len(tenants) < _MAX_UNKNOWN_NAMES and tenants.count(tenant) < max_names

    def count_refusal(self, tenant: str, limit: str) -> None:
        self.rate_limited.labels(tenant, limit).inc()

    def count_usage(self, usage: UsageRecord) -> None:
        """Add a request and its tokens to the metrics of its tenant.

        Do nothing if the request has no tenant. Such requests are counted only by model.
        """
        if usage.tenant is None:
            return
        labels = usage.tenant, usage.model, usage.adapter or ""
        self.tenant_requests.labels(*labels, str(usage.status)).inc()
        self.tenant_tokens.labels(*labels, "prompt").inc(usage.prompt_tokens)
        self.tenant_tokens.labels(*labels, "cached").inc(usage.cached_tokens)
        self.tenant_tokens.labels(*labels, "completion").inc(usage.completion_tokens)

    def count_stop(self, stopping: EarlyStop) -> None:
        self.stops.labels(stopping.reason).inc()
        stopping.add_listener(self._count_end)

    def _count_end(self, stopping: EarlyStop) -> None:
        if stopping.seconds is None:
            self.stops_unseen.labels(stopping.reason).inc()
        else:
            self.stop_seconds.labels(stopping.reason).observe(stopping.seconds)

    def count_continued(self, tokens: int, *, failed: bool) -> None:
        """Count a generation that another replica continues.

        `tokens` is the number of tokens that the other replica must process before its first new
        token. `failed` is True if the first replica has failed, or False if it is being drained.
        """
        self.continued.labels("failed" if failed else "drained").inc()
        self.continued_tokens.inc(tokens)

    def count_upload(self, sent: AdapterUpload) -> None:
        self.uploads.labels(sent.adapter, sent.cause).inc()
        self.upload_bytes.labels(sent.adapter).inc(sent.nbytes)
        self.upload_seconds.observe(sent.seconds)

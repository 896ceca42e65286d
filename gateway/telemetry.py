"""Prometheus metrics of one gateway process and the log format."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import fields

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from gateway.generation import ColdSend, StopReason
from gateway.lora import Adapters
from gateway.triton.residency import Residency

_STATES = {"redis_up", "memory_bytes", "unsent"}
_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class Metrics:
    """All metrics, in a registry of their own so that several apps fit one process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "gateway_requests_total",
            "Requests answered, by path and status (499: the client left).",
            ["path", "status"],
            registry=self.registry,
        )
        self.in_flight = Gauge(
            "gateway_generations_in_flight",
            "Generations between request and last token.",
            registry=self.registry,
        )
        self.prompt_tokens = Counter(
            "gateway_prompt_tokens_total", "Prompt tokens.", ["model"], registry=self.registry
        )
        self.completion_tokens = Counter(
            "gateway_completion_tokens_total",
            "Generated tokens.",
            ["model"],
            registry=self.registry,
        )
        self.time_to_first_token = Histogram(
            "gateway_time_to_first_token_seconds",
            "From the parsed request to the engine's first token.",
            ["model"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.duration = Histogram(
            "gateway_generation_seconds",
            "From the parsed request to its last token or its end.",
            ["model"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.stops = Counter(
            "gateway_stops_total",
            "Stop requests sent to the engine, by reason.",
            ["reason"],
            registry=self.registry,
        )
        self.cold_sends = Counter(
            "gateway_lora_cold_sends_total",
            "Requests that carried LoRA weights, by adapter and cause.",
            ["adapter", "cause"],
            registry=self.registry,
        )
        self.cold_send_bytes = Counter(
            "gateway_lora_cold_send_bytes_total",
            "LoRA weights sent to the engine.",
            ["adapter"],
            registry=self.registry,
        )
        self.cold_send_seconds = Histogram(
            "gateway_lora_cold_send_seconds",
            "From reading the weights of an adapter to the engine's first response.",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.engine_ready = Gauge(
            "gateway_engine_ready", "1 while Triton serves the core model.", registry=self.registry
        )

    def export_lora(self, adapters: Adapters, residency: Residency) -> None:
        """Adds what is read at scrape time: the store's counts and the adapters in use."""
        self.registry.register(_LoraCollector(adapters, residency))

    def count_stop(self, reason: StopReason) -> None:
        self.stops.labels(reason).inc()

    def count_cold_send(self, sent: ColdSend) -> None:
        self.cold_sends.labels(sent.adapter, sent.cause).inc()
        self.cold_send_bytes.labels(sent.adapter).inc(sent.nbytes)
        self.cold_send_seconds.observe(sent.seconds)


class _LoraCollector(Collector):
    """`lora_requests_info` as the Gateway API inference scheduler reads it, and the store."""

    def __init__(self, adapters: Adapters, residency: Residency) -> None:
        self._adapters = adapters
        self._residency = residency

    def collect(self) -> Iterator[Metric]:
        fit = self._adapters.cache_fit()
        info = GaugeMetricFamily(
            "lora_requests_info",
            "Adapters with running and waiting requests; the value is the time of the reading.",
            labels=["running_lora_adapters", "waiting_lora_adapters", "max_lora"],
        )
        labels = [
            self._names(self._residency.active),
            self._names(self._residency.waiting),
            str(fit.host_adapters if fit else 0),
        ]
        info.add_metric(labels, time.time())
        yield info
        stats = self._adapters.store.stats
        for field in fields(stats):
            value = getattr(stats, field.name)
            name = f"gateway_adapter_store_{field.name}"
            if field.name in _STATES:
                yield GaugeMetricFamily(name, "State of the adapter store.", float(value))
            else:
                yield CounterMetricFamily(name, "Events in the adapter store.", value)

    def _names(self, task_ids: frozenset[int]) -> str:
        return ",".join(sorted({self._adapters.name_of(task_id) for task_id in task_ids}))


request_id: ContextVar[str] = ContextVar("request_id", default="-")
"""The id of the request that is being served, for log lines."""


class _WithRequestId(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        record.request_id = request_id.get()
        return True


def configure_logging(level: str) -> None:
    """Lines on standard error; prompts and completions are never logged anywhere."""
    handler = logging.StreamHandler()
    handler.addFilter(_WithRequestId())
    logging.basicConfig(
        level=level.upper(),
        format="%(asctime)s %(levelname)s %(name)s [%(request_id)s]: %(message)s",
        handlers=[handler],
        force=True,
    )
    logging.getLogger("httpx").setLevel(logging.WARNING)

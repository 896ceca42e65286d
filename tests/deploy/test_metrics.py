"""Dashboard, alert rules and autoscaler use only metrics and labels that exist."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import promql_parser
import pytest
import yaml
from prometheus_client.metrics import MetricWrapperBase

from gateway.metrics.metrics import Metrics
from tests.support.local_stack import Stack
from tests.support.patience import PATIENCE_S

DEPLOY = Path(__file__).parents[2] / "deploy"
DASHBOARD = json.loads((DEPLOY / "grafana/dashboards/gateway.json").read_text(encoding="utf-8"))
ALERTS = yaml.safe_load((DEPLOY / "prometheus/alerts.yml").read_text(encoding="utf-8"))
RULES: list[dict[str, Any]] = [rule for group in ALERTS["groups"] for rule in group["rules"]]
BASE = DEPLOY / "kubernetes/base"

# Metrics that only Triton on a GPU has: name, label, label values (tensorrtllm_backend v0.17 and
# v0.19; the GPU metrics are Triton's own).
ON_GPU: dict[str, dict[str, set[str]]] = {
    "nv_trt_llm_request_metrics": {
        "request_type": {"active", "max", "scheduled", "context", "waiting"}
    },
    "nv_trt_llm_kv_cache_block_metrics": {
        "kv_cache_block_type": {"max", "free", "used", "tokens_per", "reused", "fraction"}
    },
    "nv_trt_llm_inflight_batcher_metrics": {
        "inflight_batcher_specific_metric": {
            *("total_context_tokens", "generation_requests", "micro_batch_id", "paused_requests")
        }
    },
    "nv_gpu_utilization": {"gpu_uuid": set()},
    "nv_gpu_memory_used_bytes": {"gpu_uuid": set()},
    "nv_gpu_memory_total_bytes": {"gpu_uuid": set()},
}
# Labels that Prometheus adds to each scrape. The metric `up` is Prometheus' own.
TARGET_LABELS = {"job", "instance", "namespace", "pod"}


def _expressions() -> Iterator[tuple[str, str]]:
    """Yield each expression's panel or alert, and the expression with its variables filled in."""
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", []):
            yield f"panel {panel['title']}", target["expr"].replace("$__rate_interval", "5m")
    for rule in RULES:
        yield f"alert {rule['alert']}", rule["expr"]


EXPRESSIONS = list(_expressions())


def _parts(expression: object) -> Iterator[object]:
    """Yield the expression and all its subexpressions."""
    yield expression
    children = [getattr(expression, name, None) for name in ("lhs", "rhs", "expr")]
    children += [getattr(expression, "vector_selector", None), *getattr(expression, "args", [])]
    for child in children:
        if child is not None:
            yield from _parts(child)


def _selectors(text: str) -> Iterator[promql_parser.VectorSelector]:
    for part in _parts(promql_parser.parse(text)):
        if isinstance(part, promql_parser.VectorSelector):
            yield part


def _grouped(text: str) -> set[str]:
    """Return the labels in `by`, `on` and `ignoring` clauses."""
    found: set[str] = set()
    for group in re.findall(r"\b(?:by|on|ignoring)\s*\(([^)]*)\)", text):
        found.update(label.strip() for label in group.split(","))
    return found


class Exported:
    """Names and labels of the samples on real /metrics pages."""

    def __init__(self, *pages: str) -> None:
        self.names: set[str] = {"up", *ON_GPU}
        self.labels: dict[str, set[str]] = {name: set(ON_GPU[name]) for name in ON_GPU}
        for page in pages:
            for name, kind in re.findall(r"^# TYPE (\S+) (\S+)$", page, re.MULTILINE):
                suffixes = ("_bucket", "_count", "_sum") if kind == "histogram" else ("",)
                self.names.update(name + suffix for suffix in suffixes)
            for name, labels in re.findall(r"^(\w+)\{([^\n]*)\} \S+$", page, re.MULTILINE):
                self.labels.setdefault(name, set()).update(re.findall(r'(\w+)="', labels))
        # A page lacks labels of metrics without samples. Only prometheus_client's private fields
        # have them.
        for metric in vars(Metrics()).values():
            if isinstance(metric, MetricWrapperBase):
                names = {metric._name + suffix for suffix in ("", "_total", "_bucket")}
                own = {*metric._labelnames, *(["le"] if metric._type == "histogram" else [])}
                self.labels |= dict.fromkeys(names & self.names, own)


@pytest.fixture(scope="module")
def exported(stack: Stack) -> Exported:
    return Exported(
        httpx.get(f"{stack.gateway}/metrics", timeout=PATIENCE_S).text,
        httpx.get(stack.triton_metrics, timeout=PATIENCE_S).text,
    )


@pytest.mark.parametrize(("where", "text"), EXPRESSIONS)
def test_metrics_and_labels_exist(exported: Exported, where: str, text: str) -> None:
    for selector in _selectors(text):
        name = selector.name
        assert name in exported.names, where
        if (labels := exported.labels.get(name)) is None:
            continue  # has no labels
        asked = {matcher.name for matcher in selector.matchers.matchers}
        assert asked <= labels | TARGET_LABELS, where
        assert _grouped(text) <= labels | TARGET_LABELS, where


def test_values_of_trtllm_labels_exist() -> None:
    checked = 0
    for where, text in EXPRESSIONS:
        for selector in _selectors(text):
            for matcher in selector.matchers.matchers:
                if allowed := ON_GPU.get(selector.name or "", {}).get(matcher.name):
                    assert set(matcher.value.split("|")) <= allowed, where
                    checked += 1
    assert checked > 3


def test_the_dashboard_shows_what_operators_ask_for() -> None:
    shown = {selector.name for _, text in EXPRESSIONS for selector in _selectors(text)}
    assert shown >= {
        "gateway_requests_total",
        "gateway_time_to_first_token_seconds_bucket",
        "gateway_generation_seconds_bucket",
        "gateway_completion_tokens_total",
        "gateway_generations_in_flight",
        "gateway_stops_total",
        "gateway_stop_seconds_bucket",
        "gateway_stops_unseen_total",
        "gateway_generations_continued_total",
        "gateway_lora_cold_sends_total",
        "gateway_adapter_store_redis_up",
        "gateway_engine_ready",
        "gateway_rate_limited_total",
        "gateway_replica_ready",
        "nv_trt_llm_kv_cache_block_metrics",
        "nv_trt_llm_request_metrics",
        "nv_inference_request_success",
    }


def test_panels_do_not_overlap() -> None:
    cells: set[tuple[int, int]] = set()
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(ids) == len(set(ids))
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        own = {
            (place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])
        }
        assert not own & cells, panel["title"]
        assert max(x for x, _ in own) < 24
        cells |= own


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_alerts_say_what_to_do(rule: dict[str, Any]) -> None:
    assert rule["labels"]["severity"] in ("page", "ticket")
    assert rule["annotations"].keys() == {"summary", "action"}


def _rules(kind: str) -> dict[str, str]:
    """Return the query of each Kubernetes metric as prometheus-adapter fills it in."""
    path = DEPLOY / "kubernetes/components/monitoring/prometheus-adapter-values.yaml"
    found = {}
    for rule in yaml.safe_load(path.read_text(encoding="utf-8"))["rules"][kind]:
        series = rule["seriesQuery"].partition("{")[0]
        query = rule["metricsQuery"].replace("<<.Series>>", series)
        query = query.replace("<<.LabelMatchers>>", 'namespace="a",pod=~"b|c"')
        found[rule.get("name", {"as": series})["as"]] = query.replace("<<.GroupBy>>", "pod")
    return found


@pytest.mark.parametrize("kind", ["custom", "external"])
def test_autoscalers_read_metrics_that_exist(exported: Exported, kind: str) -> None:
    rules = _rules(kind)
    source = {"custom": "Pods", "external": "External"}[kind]
    wanted = {
        metric[source.lower()]["metric"]["name"]
        for path in (DEPLOY / "kubernetes").rglob("*-scaling.yaml")
        for metric in yaml.safe_load(path.read_text(encoding="utf-8"))["spec"]["metrics"]
        if metric["type"] == source
    }
    assert wanted == rules.keys()
    for name, query in rules.items():
        for selector in _selectors(query):
            assert selector.name in exported.names, name
            labels = exported.labels.get(selector.name, set())
            assert {m.name for m in selector.matchers.matchers} <= labels | TARGET_LABELS, name


def test_the_autoscaler_counts_all_workers_of_a_pod() -> None:
    for query in _rules("custom").values():
        parsed = promql_parser.parse(query)
        assert isinstance(parsed, promql_parser.AggregateExpr)
        assert str(parsed.op) == "sum"
        assert parsed.modifier is not None
        assert parsed.modifier.labels == ["pod"]


def test_a_gateway_is_given_the_tokens_that_one_is_planned_with() -> None:
    path = BASE / "gateway-scaling.yaml"
    metrics = yaml.safe_load(path.read_text(encoding="utf-8"))["spec"]["metrics"]
    targets = {m["pods"]["metric"]["name"]: m["pods"]["target"]["averageValue"] for m in metrics}
    planned = int(targets["gateway_completion_tokens_per_second"])
    scaling = (DEPLOY.parent / "docs/scaling.md").read_text(encoding="utf-8")
    assert f"**{planned:,} tokens/s for each worker**" in scaling


def test_scraped_ports_are_those_of_the_services() -> None:
    prometheus = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text(encoding="utf-8"))
    scraped = {
        name: target["port"]
        for job in prometheus["scrape_configs"]
        for target in job["dns_sd_configs"]
        for name in target["names"]
    }
    assert scraped == {"gateway": 9001, "demo": 9000, "triton": 8002}
    compose = yaml.safe_load((DEPLOY.parent / "docker-compose.yml").read_text(encoding="utf-8"))
    assert scraped.keys() <= compose["services"].keys()
    assert compose["services"]["gateway"]["environment"]["GATEWAY_ADMIN_PORT"] == "9001"
    assert [job["job_name"] for job in prometheus["scrape_configs"]] == ["gateway", "triton"]


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not there")
def test_promtool_accepts_it() -> None:
    command = ["promtool", "check", "config", DEPLOY / "prometheus/prometheus.yml"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr

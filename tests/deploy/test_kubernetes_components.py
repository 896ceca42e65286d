"""Components of the Kubernetes manifests, as kustomize renders them."""

from __future__ import annotations

import ipaddress
import os
from pathlib import Path

import pytest
import yaml

from docs.generate import ALERTS, ROOT
from tests.deploy.manifests import KUBERNETES, OVERLAYS, Object, of, pods, rendered

MONITORED = [folder for folder in OVERLAYS if folder.name != "demo-cpu"]
PRIVATE = ("10.1.2.3", "172.20.0.1", "192.168.0.1", "169.254.169.254", "100.64.0.1", "fd00::1")
PUBLIC = ("93.184.216.34", "2606:2800:220:1::1")


@pytest.mark.parametrize("folder", MONITORED, ids=lambda folder: folder.name)
def test_monitoring_brings_prometheus_own_alerts(folder: Path) -> None:
    rules = of(rendered(folder), "PrometheusRule", "gateway")
    assert rules["spec"] == yaml.safe_load(ALERTS.read_text(encoding="utf-8"))
    assert len(rules["spec"]["groups"]) == 2


@pytest.fixture(scope="module")
def documented(tmp_path_factory: pytest.TempPathFactory) -> list[Object]:
    """Return the rendered overlay of docs/deployment.md, with its paths adapted to a folder."""
    guide = (ROOT / "docs/deployment.md").read_text(encoding="utf-8")
    start = guide.index("apiVersion: kustomize.config.k8s.io/v1beta1")
    overlay = yaml.safe_load(guide[start : guide.index("```", start)])
    folder = tmp_path_factory.mktemp("overlay")
    for kind in ("resources", "components"):
        overlay[kind] = [
            os.path.relpath(KUBERNETES / "overlays/own" / name, folder) for name in overlay[kind]
        ]
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(overlay), encoding="utf-8")
    return rendered(folder)


def _egress(manifests: list[Object], name: str) -> list[Object]:
    spec = of(manifests, "NetworkPolicy", name)["spec"]
    assert spec["policyTypes"][-1] == "Egress"
    chosen = [
        pod.name
        for pod in pods(manifests)
        if spec["podSelector"]["matchLabels"].items() <= pod.labels.items()
    ]
    assert chosen == ["Deployment gateway"]
    rules: list[Object] = spec["egress"]
    return rules


def _allows(rule: Object, address: str) -> bool:
    host = ipaddress.ip_address(address)
    for block in (peer["ipBlock"] for peer in rule["to"]):
        excepted = [ipaddress.ip_network(one) for one in block["except"]]
        if host in ipaddress.ip_network(block["cidr"]) and not any(host in net for net in excepted):
            return True
    return False


def test_adapter_sources_are_reached_and_private_networks_are_not(documented: list[Object]) -> None:
    [rule] = _egress(documented, "gateway-adapter-sources")
    assert [port["port"] for port in rule["ports"]] == [443]
    assert [address for address in PUBLIC if not _allows(rule, address)] == []
    assert [address for address in PRIVATE if _allows(rule, address)] == []


def test_the_collector_that_the_guide_names_is_reached(documented: list[Object]) -> None:
    [settings] = [m["data"] for m in documented if "GATEWAY_OTLP_ENDPOINT" in m.get("data", {})]
    host, _, port = settings["GATEWAY_OTLP_ENDPOINT"].removeprefix("http://").partition(":")
    [rule] = _egress(documented, "gateway-traces")
    assert [one["port"] for one in rule["ports"]] == [int(port)]
    [peer] = rule["to"]
    [namespace] = peer["namespaceSelector"]["matchLabels"].values()
    assert host.endswith(f".{namespace}")
    # The base's settings are still present.
    assert {"GATEWAY_MODEL_NAME", "GATEWAY_ADAPTER_SOURCES"} <= settings.keys()


def test_without_components_a_gateway_reaches_its_backends_alone(documented: list[Object]) -> None:
    peers = [
        peer["podSelector"]["matchLabels"]["app.kubernetes.io/name"]
        for rule in _egress(documented, "gateway")
        for peer in rule.get("to", [])
    ]
    assert peers == ["triton", "redis"]

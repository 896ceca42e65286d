"""Components of the Kubernetes manifests, as kustomize renders them."""

from __future__ import annotations

import ipaddress
import os
import re
from pathlib import Path
from urllib.parse import SplitResult, urlsplit

import pytest
import yaml

from docs.generate import ALERTS, ROOT
from gateway.config.database_settings import DatabaseSettings
from tests.deploy.manifests import KUBERNETES, OVERLAYS, Object, of, pods, rendered

DATABASE = KUBERNETES / "components/database"
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
        excepted = [ipaddress.ip_network(one) for one in block.get("except", [])]
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


@pytest.fixture(scope="module")
def shared() -> list[Object]:
    """Return the rendered overlay whose gateways share a PostgreSQL."""
    return rendered(KUBERNETES / "overlays/gpu-database")


def test_the_database_is_reached(shared: list[Object]) -> None:
    [rule] = _egress(shared, "gateway-database")
    assert rule["ports"] == [{"port": _example_url().port, "protocol": "TCP"}]
    for address in ("10.1.2.3", "172.20.0.1", "192.168.0.1", "100.64.0.1", "fd00::1"):
        assert _allows(rule, address)
    for address in ("169.254.169.254", *PUBLIC):
        assert not _allows(rule, address)


def test_tables_are_upgraded_by_the_gateways_image_before_it_starts(shared: list[Object]) -> None:
    spec = of(shared, "Deployment", "gateway")["spec"]["template"]["spec"]
    [upgrade], [gateway] = spec["initContainers"], spec["containers"]
    assert upgrade["args"] == ["database", "upgrade", "--if-available"]
    assert upgrade["image"] == gateway["image"]
    url = {"secretKeyRef": {"name": "gateway-database", "key": "url"}}
    for container in (upgrade, gateway):
        assert {"name": "GATEWAY_DATABASE_URL", "valueFrom": url} in container["env"]
    # The base's variables are still present, in their order.
    names = [entry["name"] for entry in gateway["env"]]
    assert names.index("REDIS_PASSWORD") < names.index("GATEWAY_REDIS_URL")


def test_the_authority_of_the_database_is_where_the_example_of_its_url_says(
    shared: list[Object],
) -> None:
    folder, _, file = _example_url().query.partition("sslrootcert=")[2].rpartition("/")
    spec = of(shared, "Deployment", "gateway")["spec"]["template"]["spec"]
    [volume] = [v for v in spec["volumes"] if v["name"] == "database"]
    assert volume["secret"]["items"] == [{"key": "ca.crt", "path": file}]
    assert volume["secret"]["optional"]
    for container in (*spec["initContainers"], *spec["containers"]):
        mount = {"name": "database", "mountPath": folder, "readOnly": True}
        assert mount in container["volumeMounts"]


def _example_url() -> SplitResult:
    """Return the URL that the component's comment shows."""
    text = (DATABASE / "kustomization.yaml").read_text(encoding="utf-8")
    [found] = re.findall(r"'(postgresql://\S+)'", text)
    url = str(found)
    DatabaseSettings.model_validate({"database_url": url})
    return urlsplit(url)


def test_the_database_has_connections_for_all_gateways(shared: list[Object]) -> None:
    """Check the number in the component's comment: PostgreSQL reserves 3 of its 100 connections."""
    pods = of(shared, "HorizontalPodAutoscaler", "gateway")["spec"]["maxReplicas"]
    surge = of(shared, "Deployment", "gateway")["spec"]["strategy"]["rollingUpdate"]["maxSurge"]
    assert not [m for m in shared if "GATEWAY_WORKERS" in m.get("data", {})]
    each = DatabaseSettings.model_fields["database_connections"].default
    connections = (pods + surge) * each
    text = (DATABASE / "kustomization.yaml").read_text(encoding="utf-8")
    assert f"may open {connections}:" in text
    assert connections <= 100 - 3


def test_without_components_a_gateway_reaches_its_backends_alone(documented: list[Object]) -> None:
    peers = [
        peer["podSelector"]["matchLabels"]["app.kubernetes.io/name"]
        for rule in _egress(documented, "gateway")
        for peer in rule.get("to", [])
    ]
    assert peers == ["triton", "redis"]

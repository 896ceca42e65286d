"""Rules of Kubernetes linters, applied to each rendered overlay."""

from __future__ import annotations

import re
import tomllib
from decimal import Decimal
from pathlib import Path

import pytest

from tests.deploy.manifests import (
    KUBERNETES,
    Object,
    Pod,
    containers,
    on_each_overlay,
    pods,
    rendered,
)

ONE_POD = {"StatefulSet redis", "Deployment demo"}
"""Services with a single pod: a disruption budget could not keep them available in a node drain."""
WHOLE_NODES = {"LeaderWorkerSet triton"}
"""Pods that request all GPUs of a node, so no two of them share a node."""
_INDEX = "leaderworkerset.sigs.k8s.io/worker-index"
_UNITS = {"": Decimal(1), "m": Decimal("0.001"), "Mi": Decimal(2**20), "Gi": Decimal(2**30)}


def _number(quantity: str) -> Decimal:
    number, unit = re.fullmatch(r"([0-9.]+)(\w*)", str(quantity)).groups()  # type: ignore[union-attr]
    return Decimal(number) * _UNITS[unit]


def _of_kind(manifests: list[Object], kind: str) -> list[Object]:
    return [manifest for manifest in manifests if manifest["kind"] == kind]


def _selects(selector: Object, pod: Pod) -> bool:
    labels = dict(selector.get("matchLabels", selector))
    # The LeaderWorkerSet controller adds this label to its pods.
    if labels.pop(_INDEX, None) is not None and pod.of["kind"] != "LeaderWorkerSet":
        return False
    return labels.items() <= pod.labels.items()


def _has_gpu(container: Object) -> bool:
    return "nvidia.com/gpu" in container["resources"]["limits"]


@on_each_overlay
def test_images_stand_for_one_release(folder: Path) -> None:
    project = tomllib.loads((KUBERNETES.parents[1] / "pyproject.toml").read_text("utf-8"))
    for pod, container in containers(rendered(folder)):
        name, _, tag = container["image"].partition(":")
        assert tag, pod.name
        assert not tag.startswith("latest"), pod.name
        if name == "triton-openai-gateway":
            assert tag.removesuffix("-demo") == project["project"]["version"]


@on_each_overlay
def test_no_container_has_rights(folder: Path) -> None:
    for pod, container in containers(rendered(folder)):
        spec, own = pod.spec, container["securityContext"]
        assert spec["automountServiceAccountToken"] is False, pod.name
        assert spec["securityContext"]["runAsNonRoot"] is True, pod.name
        assert spec["securityContext"]["runAsUser"] > 0, pod.name
        assert spec["securityContext"]["runAsGroup"] > 0, pod.name
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}, pod.name
        assert own["allowPrivilegeEscalation"] is False, pod.name
        assert own["capabilities"] == {"drop": ["ALL"]}, pod.name
        # On a GPU, TensorRT-LLM may write outside its home folder. That could not be tested here.
        assert own.get("readOnlyRootFilesystem") is (None if _has_gpu(container) else True)
        # No further field may weaken the security context.
        assert own.keys() <= {
            *("allowPrivilegeEscalation", "capabilities", "readOnlyRootFilesystem")
        }, pod.name
        assert not {"hostNetwork", "hostPID", "hostIPC", "serviceAccountName"} & spec.keys()
        assert not any("hostPort" in port for port in container.get("ports", [])), pod.name
    kinds = {manifest["kind"] for manifest in rendered(folder)}
    assert not {kind for kind in kinds if kind.startswith(("Role", "Cluster", "ServiceAccount"))}


@on_each_overlay
def test_no_secret_and_no_disk_of_a_node_is_in_it(folder: Path) -> None:
    assert not _of_kind(rendered(folder), "Secret")
    for pod, container in containers(rendered(folder)):
        assert not any("hostPath" in volume for volume in pod.volumes), pod.name
        for entry in container.get("env", []):
            # Kubernetes composes values that contain a secret from variables.
            if re.search(
                "KEY|PASSWORD|TOKEN|SECRET|AUTH|METADATA|REDIS_URL|DATABASE_URL", entry["name"]
            ):
                assert "valueFrom" in entry or "$(" in entry["value"], entry["name"]


@on_each_overlay
def test_containers_ask_for_what_they_may_take(folder: Path) -> None:
    for pod, container in containers(rendered(folder)):
        asked, most = container["resources"]["requests"], container["resources"]["limits"]
        assert {"cpu", "memory"} <= asked.keys(), pod.name
        assert _number(asked["memory"]) <= _number(most["memory"]), pod.name
        # A CPU limit would throttle the container, seen as pauses between tokens.
        assert "cpu" not in most, pod.name
        empty = [volume["emptyDir"] for volume in pod.volumes if "emptyDir" in volume]
        assert all("sizeLimit" in volume for volume in empty), pod.name
        # Files on a memory volume count as the container's memory.
        shared = [v["sizeLimit"] for v in empty if v.get("medium") == "Memory"]
        assert sum(map(_number, shared)) < _number(most["memory"]), pod.name


@on_each_overlay
def test_containers_have_probes(folder: Path) -> None:
    for pod, container in containers(rendered(folder), init=False):
        assert "readinessProbe" in container, pod.name
        if container["name"] == "ranks":
            # sshd is the first process of this container, so Kubernetes notices its end. A running
            # engine does not use sshd, and a restart would end that engine.
            assert "livenessProbe" not in container
            continue
        ready, live = container["readinessProbe"], container["livenessProbe"]
        if "httpGet" in live:
            # An unavailable or loading engine must not restart the container.
            assert live["httpGet"]["path"].endswith("/live"), pod.name
            assert ready["httpGet"]["path"].endswith("/ready"), pod.name
            assert "startupProbe" in container, pod.name
        # A machine that is busy for some seconds must not restart it either.
        assert live["periodSeconds"] * live["failureThreshold"] >= 60, pod.name
        assert live["timeoutSeconds"] > 1, pod.name
        names = {port["name"] for port in container["ports"]}
        for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
            probe = container.get(kind, {}).get("httpGet")
            assert probe is None or probe["port"] in names, pod.name


@on_each_overlay
def test_a_lost_node_takes_no_more_than_it_must(folder: Path) -> None:
    manifests = rendered(folder)
    for pod in pods(manifests):
        budgets = [
            budget["spec"]
            for budget in _of_kind(manifests, "PodDisruptionBudget")
            if _selects(budget["spec"]["selector"], pod)
        ]
        if pod.name in ONE_POD:
            assert pod.of["spec"]["replicas"] == 1
            assert not budgets, pod.name
            continue
        [budget] = budgets
        assert budget["maxUnavailable"] == 1, pod.name
        # Otherwise a pod that never gets ready would block the drain of its node.
        assert budget["unhealthyPodEvictionPolicy"] == "AlwaysAllow", pod.name
        if pod.name in WHOLE_NODES:
            [container] = pod.spec["containers"]
            assert container["resources"]["limits"]["nvidia.com/gpu"] == "8"
            continue
        spread = pod.spec["topologySpreadConstraints"]
        assert "kubernetes.io/hostname" in [one["topologyKey"] for one in spread], pod.name
        assert all(_selects(one["labelSelector"], pod) for one in spread), pod.name


@on_each_overlay
def test_every_pod_is_behind_a_network_policy(folder: Path) -> None:
    manifests = rendered(folder)
    for pod in pods(manifests):
        directions = {
            direction
            for policy in _of_kind(manifests, "NetworkPolicy")
            if _selects(policy["spec"]["podSelector"], pod)
            for direction in policy["spec"]["policyTypes"]
        }
        assert directions == {"Ingress", "Egress"}, pod.name


@on_each_overlay
def test_nothing_names_what_is_not_there(folder: Path) -> None:
    manifests = rendered(folder)
    for service in _of_kind(manifests, "Service"):
        name, spec = service["metadata"]["name"], service["spec"]
        # Access from outside depends on the cluster.
        assert spec.get("type", "ClusterIP") == "ClusterIP", name
        chosen = [pod for pod in pods(manifests) if _selects(spec["selector"], pod)]
        assert chosen, name
        ports = {port["name"] for port in chosen[0].spec["containers"][0]["ports"]}
        numbers = {p["containerPort"] for p in chosen[0].spec["containers"][0]["ports"]}
        assert {p.get("targetPort", p["port"]) for p in spec["ports"]} <= ports | numbers, name
    for kind in ("PodDisruptionBudget", "NetworkPolicy"):
        for manifest in _of_kind(manifests, kind):
            spec = manifest["spec"]
            selector = spec.get("selector") or spec["podSelector"]
            assert any(_selects(selector, pod) for pod in pods(manifests)), manifest["metadata"]
    for monitor in _of_kind(manifests, "ServiceMonitor"):
        labels = monitor["spec"]["selector"]["matchLabels"].items()
        ports = {
            port["name"]
            for service in _of_kind(manifests, "Service")
            if labels <= service["metadata"].get("labels", {}).items()
            for port in service["spec"]["ports"]
        }
        assert {end["port"] for end in monitor["spec"]["endpoints"]} <= ports
    known = {(m["apiVersion"], m["kind"], m["metadata"]["name"]): m for m in manifests}
    for scaler in _of_kind(manifests, "HorizontalPodAutoscaler"):
        target = scaler["spec"]["scaleTargetRef"]
        scaled = known[target["apiVersion"], target["kind"], target["name"]]
        # A fixed count would undo the autoscaler's count each time it is applied.
        assert "replicas" not in scaled["spec"]
    claims = {m["metadata"]["name"] for m in _of_kind(manifests, "PersistentVolumeClaim")}
    maps = {m["metadata"]["name"] for m in _of_kind(manifests, "ConfigMap")}
    for pod, container in containers(manifests):
        own = {volume["name"]: volume for volume in pod.volumes}
        for template in pod.of["spec"].get("volumeClaimTemplates", []):
            own[template["metadata"]["name"]] = {}
        assert {mount["name"] for mount in container["volumeMounts"]} <= own.keys(), pod.name
        for volume in own.values():
            assert volume.get("persistentVolumeClaim", {"claimName": None})["claimName"] in {
                *claims,
                None,
            }
            # The name ends with the hash of the content.
            assert volume.get("configMap", {"name": None})["name"] in {*maps, None}
        for source in container.get("envFrom", []):
            assert source.get("configMapRef", {"name": None})["name"] in {*maps, None}


@on_each_overlay
@pytest.mark.parametrize("kind", ["Deployment", "StatefulSet"])
def test_workloads_select_their_own_pods(folder: Path, kind: str) -> None:
    manifests = rendered(folder)
    for workload in _of_kind(manifests, kind):
        selector = workload["spec"]["selector"]
        chosen = [pod.name for pod in pods(manifests) if _selects(selector, pod)]
        assert chosen == [f"{kind} {workload['metadata']['name']}"]

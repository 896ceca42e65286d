"""Kubernetes manifests: each file against Kubernetes' schemas, and the rendered overlays."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from gateway.config.settings import Settings
from ops.deployment.launch import Launch, command, shell_text
from tests.deploy.manifests import (
    KUBERNETES,
    Object,
    containers,
    kustomization,
    of,
    on_each_overlay,
    pod_templates,
    rendered,
    written,
)

KUSTOMIZATIONS = sorted(path.parent for path in KUBERNETES.rglob("kustomization.yaml"))
MULTI_NODE = KUBERNETES / "overlays/multi-node"
# Kubernetes enables preStop.sleep by default from 1.30.
RESTRICTED = Launch(model_repo="/models/repository", tritonserver="/launch/tritonserver.sh")
KEYS = ("redis-password", "triton-key")
# The oldest supported version, and the newest three that have schemas.
_NEWEST = int(kubernetes_validate.latest_version().split(".")[1])
VERSIONS = ("1.30", *(f"1.{minor}" for minor in range(_NEWEST - 2, _NEWEST + 1)))

# Schemas for the fields used of two custom resources (leaderworkerset.x-k8s.io/v1 and
# monitoring.coreos.com/v1). Their pod templates are checked as pods.
_TEMPLATE = {
    "type": "object",
    "required": ["spec"],
    "properties": {"metadata": {"type": "object"}, "spec": {"type": "object"}},
    "additionalProperties": False,
}
CUSTOM: dict[str, dict[str, Any]] = {
    "LeaderWorkerSet": {
        "type": "object",
        "required": ["leaderWorkerTemplate"],
        "properties": {
            "replicas": {"type": "integer", "minimum": 0},
            "leaderWorkerTemplate": {
                "type": "object",
                "required": ["workerTemplate"],
                "properties": {
                    "size": {"type": "integer", "minimum": 1},
                    "restartPolicy": {
                        "enum": ["Default", "RecreateGroupOnPodRestart", "None"],
                    },
                    "leaderTemplate": _TEMPLATE,
                    "workerTemplate": _TEMPLATE,
                },
                "additionalProperties": False,
            },
        },
        "additionalProperties": False,
    },
    "PrometheusRule": {
        "type": "object",
        "required": ["groups"],
        "properties": {
            "groups": {
                "type": "array",
                "items": {
                    "type": "object",
                    "required": ["name", "rules"],
                    "properties": {"name": {"type": "string"}, "rules": {"type": "array"}},
                    "additionalProperties": False,
                },
            },
        },
        "additionalProperties": False,
    },
    "ServiceMonitor": {
        "type": "object",
        "required": ["selector", "endpoints"],
        "properties": {
            "jobLabel": {"type": "string"},
            "selector": {
                "type": "object",
                "properties": {"matchLabels": {"type": "object"}},
                "additionalProperties": False,
            },
            "endpoints": {
                "type": "array",
                "items": {
                    "type": "object",
                    "properties": {
                        name: {"type": "string"} for name in ("port", "path", "interval")
                    },
                    "additionalProperties": False,
                },
            },
        },
        "additionalProperties": False,
    },
}


def _check(manifest: Object) -> None:
    if manifest["kind"] not in CUSTOM:
        for version in VERSIONS:
            kubernetes_validate.validate(manifest, version, strict=True)
        return
    jsonschema.validate(manifest["spec"], CUSTOM[manifest["kind"]])
    for pod in pod_templates(manifest):
        named = {**pod, "metadata": {"name": "pod", **pod.get("metadata", {})}}
        _check({"apiVersion": "v1", "kind": "Pod", **named})


BASE = written(KUBERNETES / "base")


@pytest.mark.parametrize("folder", KUSTOMIZATIONS, ids=lambda folder: folder.name)
def test_manifests_are_valid(folder: Path) -> None:
    manifests = written(folder)
    for manifest in manifests:
        _check(manifest)
    keys = [(manifest["kind"], manifest["metadata"]["name"]) for manifest in manifests]
    assert len(keys) == len(set(keys))


@on_each_overlay
def test_patches_have_their_targets(folder: Path) -> None:
    own = kustomization(folder)
    known = {(m["kind"], m["metadata"]["name"]) for m in written(folder)}
    for patch in own.get("patches", []):
        content = yaml.safe_load(patch["patch"])
        target = patch.get("target") or {"kind": content["kind"], **content["metadata"]}
        assert (target["kind"], target["name"]) in known
    for replicas in own.get("replicas", []):
        assert ("StatefulSet", replicas["name"]) in known
    images = {image["name"] for image in own.get("images", [])}
    assert images <= {container["image"] for _, container in containers(written(folder))}
    for made in own.get("configMapGenerator", []):
        assert all((folder / name).exists() for name in made.get("files", []))


@pytest.mark.slow
@on_each_overlay
def test_kustomize_builds_it(folder: Path) -> None:
    built = rendered(folder)
    for manifest in built:
        _check(manifest)


def test_settings_of_the_gateway_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    literals = kustomization(KUBERNETES / "base")["configMapGenerator"][0]["literals"]
    values = dict(literal.split("=", 1) for literal in literals)
    env = {entry["name"]: entry.get("value", "") for entry in _gateway()["env"]}
    values |= {name: value for name, value in env.items() if name.startswith("GATEWAY_")}
    assert set(values) <= {f"GATEWAY_{name.upper()}" for name in Settings.model_fields}
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    Settings()  # type: ignore[call-arg]  # as the process reads it
    ports = {port["name"]: port["containerPort"] for port in _gateway()["ports"]}
    assert ports == {"api": 9000, "admin": int(values["GATEWAY_ADMIN_PORT"])}
    host, _, port = values["GATEWAY_TRITON_GRPC"].removeprefix("dns:///").partition(":")
    service = of(BASE, "Service", host)
    assert service["spec"]["clusterIP"] == "None"
    assert int(port) in [port["port"] for port in service["spec"]["ports"]]
    spec = of(BASE, "Deployment", "gateway")["spec"]["template"]["spec"]
    # With an emptyDir, the store ends with its pod, and other gateways must not wait for it.
    [store] = [v for v in spec["volumes"] if v["name"] == "adapters"]
    assert ("emptyDir" in store) == (values["GATEWAY_STORE_EPHEMERAL"] == "true")


def _gateway() -> Object:
    spec = of(BASE, "Deployment", "gateway")["spec"]["template"]["spec"]
    container: Object = spec["containers"][0]
    return container


@pytest.mark.parametrize("kind", ["Service", "NetworkPolicy", "PodDisruptionBudget"])
def test_selectors_and_ports_name_pods(kind: str) -> None:
    pods = [pod for manifest in BASE for pod in pod_templates(manifest)]
    found = 0
    for manifest in BASE:
        if manifest["kind"] != kind:
            continue
        found += 1
        spec = manifest["spec"]
        selector = spec.get("podSelector") or spec.get("selector")
        labels = selector.get("matchLabels", selector)
        selected = [pod for pod in pods if labels.items() <= pod["metadata"]["labels"].items()]
        assert len(selected) == 1
        ports = selected[0]["spec"]["containers"][0]["ports"]
        names = {port["name"] for port in ports} | {port["containerPort"] for port in ports}
        for port in spec.get("ports", []):
            assert port.get("targetPort", port["port"]) in names
        for rule in spec.get("ingress", []):
            assert {port["port"] for port in rule["ports"]} <= names
    assert found


def test_only_the_gateway_reaches_triton_and_redis() -> None:
    for name in ("triton", "redis"):
        spec = of(BASE, "NetworkPolicy", name)["spec"]
        assert set(spec["policyTypes"]) == {"Ingress", "Egress"}
        assert "egress" not in spec
        assert all("from" in rule for rule in spec["ingress"])


def test_no_pod_gets_variables_for_services() -> None:
    """Check that service links are off: the Service `gateway` would set GATEWAY_PORT=tcp://..."""
    for folder in KUSTOMIZATIONS:
        for manifest in written(folder):
            for pod in pod_templates(manifest):
                assert pod["spec"]["enableServiceLinks"] is False, manifest["metadata"]


def test_redis_and_triton_want_keys_that_are_in_no_file() -> None:
    keys = {name: {"secretKeyRef": {"name": "backend-keys", "key": name}} for name in KEYS}
    password, key = keys.values()
    container = of(BASE, "StatefulSet", "redis")["spec"]["template"]["spec"]["containers"][0]
    assert {"name": "REDIS_PASSWORD", "valueFrom": password} in container["env"]
    assert {"name": "REDISCLI_AUTH", "valueFrom": password} in container["env"]
    arguments = container["args"]
    assert arguments[arguments.index("--requirepass") + 1] == "$(REDIS_PASSWORD)"
    environment = {entry["name"]: entry for entry in _gateway()["env"]}
    assert environment["REDIS_PASSWORD"]["valueFrom"] == password
    assert environment["TRITON_KEY"]["valueFrom"] == key
    # Kubernetes expands only variables that are defined earlier in the list.
    names = list(environment)
    for name in ("GATEWAY_REDIS_URL", "GATEWAY_TRITON_METADATA"):
        for used in re.findall(r"\$\((\w+)\)", environment[name]["value"]):
            assert names.index(used) < names.index(name)
    group = of(written(MULTI_NODE), "LeaderWorkerSet", "triton")["spec"]["leaderWorkerTemplate"]
    for pod in (
        of(BASE, "StatefulSet", "triton")["spec"]["template"],
        group["leaderTemplate"],
        group["workerTemplate"],
    ):
        mounts = {m["name"]: m["mountPath"] for m in pod["spec"]["containers"][0]["volumeMounts"]}
        volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
        assert mounts["key"] == "/run/secrets/triton"
        assert volumes["key"]["secret"]["secretName"] == "backend-keys"
        assert volumes["key"]["secret"]["items"] == [{"key": "triton-key", "path": "key"}]
        assert mounts["launch"] == "/launch"
        assert volumes["launch"]["configMap"]["defaultMode"] == 0o555


def test_every_image_can_be_named_by_digest() -> None:
    """Check that each image is in a kustomization's `images`, where its digest can be set."""
    for folder in (KUBERNETES / "base", MULTI_NODE, KUBERNETES / "overlays/demo-cpu"):
        named = {image["name"] for image in kustomization(folder)["images"]}
        manifests = [m for m in written(folder) if folder.name == "base" or m not in BASE]
        for _, container in containers(manifests):
            assert container["image"].partition(":")[0] in named


def test_triton_starts_as_the_launcher_starts_it() -> None:
    spec = of(BASE, "StatefulSet", "triton")["spec"]["template"]["spec"]
    assert spec["containers"][0]["command"] == ["/launch/mpirun.sh", *command(RESTRICTED)[1:]]


def test_several_nodes_start_as_the_launcher_starts_them() -> None:
    group = of(written(MULTI_NODE), "LeaderWorkerSet", "triton")["spec"]["leaderWorkerTemplate"]
    gpus = {
        container["resources"]["limits"]["nvidia.com/gpu"]
        for pod in (group["leaderTemplate"], group["workerTemplate"])
        for container in pod["spec"]["containers"]
    }
    leader = group["leaderTemplate"]["spec"]["containers"][0]
    assert gpus == {leader["env"][0]["value"]}
    ranks = group["size"] * int(gpus.pop())
    launch = replace(RESTRICTED, world_size=ranks)
    script = (MULTI_NODE / "ranks.sh").read_text(encoding="utf-8")
    started = script.partition("exec ")[2].replace("/launch/mpirun.sh", "mpirun")
    assert started.strip() == shell_text(command(launch), {}).strip()


def test_scripts_are_sound() -> None:
    scripts = sorted(KUBERNETES.parent.rglob("*.sh"))
    assert len(scripts) == 8
    checker = Path(sys.executable).parent / "shellcheck"
    done = subprocess.run([checker, *scripts], capture_output=True, text=True, check=False)
    assert done.stdout == ""

"""Kubernetes manifests as written in the files, and as rendered by kustomize."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

KUBERNETES = Path(__file__).parents[2] / "deploy/kubernetes"
OVERLAYS = sorted((KUBERNETES / "overlays").iterdir())

Object = dict[str, Any]

on_each_overlay = pytest.mark.parametrize("folder", OVERLAYS, ids=lambda folder: folder.name)


class Pod(NamedTuple):
    """A pod template. `of` is the Kubernetes object that contains it."""

    of: Object
    labels: dict[str, str]
    spec: Object

    @property
    def name(self) -> str:
        return f"{self.of['kind']} {self.of['metadata']['name']}"

    @property
    def volumes(self) -> list[Object]:
        found: list[Object] = self.spec.get("volumes", [])
        return found


def read(path: Path) -> list[Object]:
    return [found for found in yaml.safe_load_all(path.read_text(encoding="utf-8")) if found]


def kustomization(folder: Path) -> Object:
    return read(folder / "kustomization.yaml")[0]


def written(folder: Path) -> list[Object]:
    """Return the objects in a kustomization and in its resources and components, unrendered."""
    found: list[Object] = []
    own = kustomization(folder)
    for name in [*own.get("resources", []), *own.get("components", [])]:
        path = (folder / name).resolve()
        found += written(path) if path.is_dir() else read(path)
    return found


@cache
def rendered(folder: Path) -> list[Object]:
    """Return the objects that `kubectl apply --kustomize` would send. Skip the test without
    kubectl.
    """
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not there, so nothing puts the manifests together")
    command = ["kubectl", "kustomize", folder]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


def of(manifests: list[Object], kind: str, name: str) -> Object:
    return next(m for m in manifests if (m["kind"], m["metadata"]["name"]) == (kind, name))


def pod_templates(manifest: Object) -> list[Object]:
    """Return the pod templates of an object."""
    spec = manifest.get("spec", {})
    group = spec.get("leaderWorkerTemplate", {})
    candidates = [spec.get("template"), group.get("leaderTemplate"), group.get("workerTemplate")]
    return [pod for pod in candidates if pod]


def pods(manifests: list[Object]) -> list[Pod]:
    return [
        Pod(manifest, pod["metadata"]["labels"], pod["spec"])
        for manifest in manifests
        for pod in pod_templates(manifest)
    ]


def containers(manifests: list[Object], *, init: bool = True) -> Iterator[tuple[Pod, Object]]:
    """Yield each container with its pod, and with `init` each init container."""
    for pod in pods(manifests):
        first = pod.spec.get("initContainers", []) if init else []
        for container in [*first, *pod.spec["containers"]]:
            yield pod, container

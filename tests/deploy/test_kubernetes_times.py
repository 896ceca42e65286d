"""Timeouts in the manifests that must add up: pod termination, and engine loading."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from gateway.config.settings import Settings
from gateway.conversations.upkeep import GOODBYE_TIMEOUT_S
from gateway.scheduling.replicas import _LOOKUP_PERIOD_S
from gateway.service_setup import _CLOSE_TIMEOUT_S
from ops.deployment.running import EXIT_MARGIN, TRITON_EXIT_TIMEOUT
from tests.deploy.manifests import OVERLAYS, Object, Pod, pods, rendered

# Seconds for which DNS may return an outdated address: `ttl` plus `cache` of CoreDNS' usual
# Kubernetes configuration.
NAME_CACHED_S = 30
# Seconds until all nodes stop sending new connections to a pod. One or two are usual.
NODES_LEARN_S = 5
# Default time that a proxy waits for the first byte (nginx, AWS load balancers), in seconds.
PROXY_WAITS_S = 60
RESERVE_S = 5
# Assumptions in the manifests' comments about loading an engine.
GB_OF_A_GPU = 80
TRITON_STARTS_S = 120

SERVING = [folder for folder in OVERLAYS if folder.name != "demo-cpu"]
on_each_that_serves = pytest.mark.parametrize("folder", SERVING, ids=lambda folder: folder.name)


def _default(setting: str) -> Any:
    return Settings.model_fields[setting].default


def _value(manifests: list[Object], setting: str) -> float:
    """Return the setting of the overlay's gateways, or its default."""
    [settings] = [
        manifest["data"]
        for manifest in manifests
        if manifest["kind"] == "ConfigMap"
        and manifest["metadata"]["name"].startswith("gateway-settings")
    ]
    return float(settings.get(f"GATEWAY_{setting.upper()}", _default(setting)))


def _pod(manifests: list[Object], container: str) -> Pod:
    [found] = [p for p in pods(manifests) if p.spec["containers"][0]["name"] == container]
    return found


def _before_term(pod: Pod) -> int:
    seconds: int = pod.spec["containers"][0]["lifecycle"]["preStop"]["sleep"]["seconds"]
    return seconds


@on_each_that_serves
def test_a_gateway_gets_the_time_that_its_end_takes(folder: Path) -> None:
    manifests = rendered(folder)
    pod = _pod(manifests, "gateway")
    assert _before_term(pod) >= NODES_LEARN_S
    needed = _before_term(pod) + _value(manifests, "drain_seconds")
    needed += _value(manifests, "shutdown_grace") + _CLOSE_TIMEOUT_S + GOODBYE_TIMEOUT_S
    assert pod.spec["terminationGracePeriodSeconds"] >= needed + RESERVE_S


@on_each_that_serves
def test_triton_ends_when_nobody_sends_it_anything(folder: Path) -> None:
    manifests = rendered(folder)
    pod = _pod(manifests, "triton")
    left_alone = NAME_CACHED_S + _LOOKUP_PERIOD_S
    assert _before_term(pod) >= left_alone + _value(manifests, "replica_drain_grace")
    needed = _before_term(pod) + TRITON_EXIT_TIMEOUT + EXIT_MARGIN
    assert pod.spec["terminationGracePeriodSeconds"] >= needed + RESERVE_S
    # Triton's default timeout applies. mpirun would not give it to rank 0, so a script does.
    assert "--exit-timeout-secs=" not in str(manifests)
    assert "/launch/mpirun.sh" in str(manifests)


def test_ranks_of_other_nodes_outlive_their_leader(tmp_path: Path) -> None:
    [folder] = [folder for folder in OVERLAYS if folder.name == "multi-node"]
    leader, worker = (_pod(rendered(folder), name).spec for name in ("triton", "ranks"))
    outlives = worker["terminationGracePeriodSeconds"] - leader["terminationGracePeriodSeconds"]
    assert outlives >= RESERVE_S
    hook = worker["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
    # `orted`, Open MPI's process on other nodes, ends after the leader's mpirun.
    with subprocess.Popen([shutil.copy("/bin/sleep", tmp_path / "orted"), "2"]) as orted:
        subprocess.run(hook, check=True, timeout=60)
        assert orted.poll() is not None


@on_each_that_serves
def test_engines_have_the_time_to_load_that_is_promised(folder: Path) -> None:
    """Check the promise in the comment at each startup probe: GB per GPU, read at a given MB/s."""
    container = _pod(rendered(folder), "triton").spec["containers"][0]
    gigabytes = GB_OF_A_GPU * int(container["resources"]["limits"]["nvidia.com/gpu"])
    rate = 200 if folder.name == "multi-node" else 50
    probe = container["startupProbe"]
    has = probe["periodSeconds"] * probe["failureThreshold"]
    assert has >= gigabytes * 1000 / rate + TRITON_STARTS_S


def test_a_refusal_by_the_queue_comes_before_a_proxy_gives_up() -> None:
    assert _default("queue_timeout") + _default("keep_alive") < PROXY_WAITS_S

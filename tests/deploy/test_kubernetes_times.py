"""Times of the manifests that have to add up: how pods end, and how long engines may load."""

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

# Seconds for which a name server may give out an address that is gone: `ttl` and `cache` of
# Kubernetes' usual configuration of CoreDNS.
NAME_CACHED_S = 30
# In which all nodes know that a pod gets no new connections any more; what is usual is one or two.
NODES_LEARN_S = 5
# What a proxy in front waits for the first byte of an answer, by default (nginx, AWS' balancers).
PROXY_WAITS_S = 60
RESERVE_S = 5
# What the manifests promise of the loading of an engine.
GB_OF_A_GPU = 80
TRITON_STARTS_S = 120

SERVING = [folder for folder in OVERLAYS if folder.name != "demo-cpu"]
on_each_that_serves = pytest.mark.parametrize("folder", SERVING, ids=lambda folder: folder.name)


def _default(setting: str) -> Any:
    return Settings.model_fields[setting].default


def _value(manifests: list[Object], setting: str) -> float:
    """Of the gateways that are in the overlay."""
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
    # Triton's own default is in force; and rank 0 is given it, which mpirun would not do.
    assert "--exit-timeout-secs=" not in str(manifests)
    assert "/launch/mpirun.sh" in str(manifests)


def test_ranks_of_other_nodes_outlive_their_leader(tmp_path: Path) -> None:
    [folder] = [folder for folder in OVERLAYS if folder.name == "multi-node"]
    leader, worker = (_pod(rendered(folder), name).spec for name in ("triton", "ranks"))
    outlives = worker["terminationGracePeriodSeconds"] - leader["terminationGracePeriodSeconds"]
    assert outlives >= RESERVE_S
    hook = worker["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
    # Open MPI's process beside the ranks of other nodes: it ends once the leader's mpirun has.
    with subprocess.Popen([shutil.copy("/bin/sleep", tmp_path / "orted"), "2"]) as orted:
        subprocess.run(hook, check=True, timeout=60)
        assert orted.poll() is not None


@on_each_that_serves
def test_engines_have_the_time_to_load_that_is_promised(folder: Path) -> None:
    """The comment at each startup probe: GB for each GPU, read at so many MB/s."""
    container = _pod(rendered(folder), "triton").spec["containers"][0]
    gigabytes = GB_OF_A_GPU * int(container["resources"]["limits"]["nvidia.com/gpu"])
    rate = 200 if folder.name == "multi-node" else 50
    probe = container["startupProbe"]
    has = probe["periodSeconds"] * probe["failureThreshold"]
    assert has >= gigabytes * 1000 / rate + TRITON_STARTS_S


def test_a_refusal_by_the_queue_comes_before_a_proxy_gives_up() -> None:
    assert _default("queue_timeout") + _default("keep_alive") < PROXY_WAITS_S

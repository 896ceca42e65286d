"""Benchmark of the LiteLLM proxy, installed from its wheel into a virtual environment under build/.

LiteLLM speaks OpenAI's protocol to its upstream, so its upstream is a scripted OpenAI server. This
server sends tokens at the same pace as the scripted Triton, which is the gateway's upstream. The
time that a proxy adds to a first token is its latency minus that of its own upstream.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench import direct
from bench.machine import ROOT
from bench.measure import chat, percentile, window
from bench.pace import BURST
from bench.servers import Bench, Server
from ops.local_stack.ports import LOCALHOST

REQUIREMENT = "litellm[proxy]>=1.80,<2"
_VENV = ROOT / "build" / "bench" / "litellm"
_INSTALL_WITHIN_S = 300
_BEAT_MS = 20
_STREAMS = (20, 50)


def litellm(bench: Bench) -> list[dict[str, Any]]:
    """Measure LiteLLM and the gateway under the same load, each with its own scripted upstream."""
    if (executable := _install(bench)) is None:
        return []
    rows = []
    with _upstream(bench) as upstream, _proxy(bench, executable, upstream) as server:
        body = chat(seed=BURST, tokens=1)
        plain = window(bench, upstream, body, 1, seconds=bench.seconds / 2)
        rows.append(_row(bench, server, list(plain.seen.first)))
    with bench.upstream() as triton, bench.gateway(triton) as server:
        asks = [direct.infer_request(str(n), list(range(5, 21)), 1, BURST) for n in range(500)]
        rows.append(_row(bench, server, asyncio.run(direct.first_tokens(triton, asks))[20:]))
    rows[0]["who"] = f"LiteLLM {_version(executable)}"
    return rows


def _row(bench: Bench, server: Server, straight_s: list[float]) -> dict[str, Any]:
    # Measure the heaviest loads last. After a window, the server still processes unfinished
    # requests. They would disturb the next measurement.
    row: dict[str, Any] = {"who": server.name}
    seconds = max(bench.seconds, 2.0)
    alone = window(bench, server, chat(seed=BURST, tokens=1), 1, seconds=seconds)
    for percent in (50, 99):
        added = percentile(alone.seen.first, percent) - percentile(straight_s, percent)
        row[f"added first token p{percent} ms"] = 1e3 * added
    busy = window(bench, server, chat(seed=BURST, tokens=1), 16, seconds=seconds)
    row["CPU us/request"] = busy.us_per_request
    row["requests/core-s"] = busy.seen.finished / max(busy.cpu_s, 1e-9)
    for streams in _STREAMS:
        seen = window(bench, server, chat(seed=_BEAT_MS), streams, seconds=seconds, settle_s=2.0)
        wanted = seen.seconds * streams * 1000 / _BEAT_MS
        row[f"CPU us/token, {streams} streams"] = seen.us_per_token
        row[f"% of the pace, {streams} streams"] = 100 * seen.seen.tokens / wanted
    row["RSS MiB"] = server.rss() / 2**20
    return row


@contextlib.contextmanager
def _upstream(bench: Bench) -> Iterator[Server]:
    port = bench.claims.take_free()
    command = [sys.executable, "-m", "bench.openai_upstream", "--port", str(port)]
    with bench.running("openai-upstream", command, None, bench.cores.upstream) as child:
        yield Server("scripted OpenAI server", child.pid, port)


@contextlib.contextmanager
def _proxy(bench: Bench, executable: Path, upstream: Server) -> Iterator[Server]:
    port = bench.claims.take_free()
    config = bench.folder / "litellm.json"  # write JSON, which is valid YAML
    parameters = {
        "model": "openai/demo",
        "api_base": f"http://{LOCALHOST}:{upstream.port}/v1",
        "api_key": "unused",
    }
    models = [{"model_name": "demo", "litellm_params": parameters}]
    config.write_text(json.dumps({"model_list": models}))
    command = [str(executable), "--config", str(config), "--host", LOCALHOST]
    command += ["--port", str(port), "--num_workers", "1", "--telemetry", "False"]
    live = "/health/liveliness"
    # Use the list of model prices in the wheel, so that LiteLLM does not download the list.
    env = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_LOG": "ERROR", "PYTHONPATH": ""}
    # Require no API keys, so that the cost of checking keys is not included.
    env["LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY"] = "true"
    ready = f"http://{LOCALHOST}:{port}{live}"
    with bench.running("litellm", command, ready, bench.cores.gateway, **env) as child:
        yield Server("LiteLLM", child.pid, port, live=live)


def _install(bench: Bench) -> Path | None:
    """Return the path of the command `litellm`. Install the proxy if this is the first run.

    If the installation fails, add a note to the results and return None.
    """
    executable, marker = _VENV / "bin" / "litellm", _VENV / ".installed"
    if marker.exists() and marker.read_text() == REQUIREMENT:
        return executable
    bench.log(f"litellm: installing {REQUIREMENT} into {_VENV.relative_to(ROOT)}")
    install = [str(_VENV / "bin" / "pip"), "install", "--quiet", "--disable-pip-version-check"]
    try:
        for command in ([sys.executable, "-m", "venv", str(_VENV)], [*install, REQUIREMENT]):
            subprocess.run(
                command, check=True, capture_output=True, text=True, timeout=_INSTALL_WITHIN_S
            )
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or str(error)
        bench.notes.append(f"litellm: not measured, it could not be installed: {said[-200:]}")
        return None
    marker.write_text(REQUIREMENT)
    return executable


def _version(executable: Path) -> str:
    code = "from importlib.metadata import version; print(version('litellm'))"
    command = [str(executable.parent / "python"), "-c", code]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

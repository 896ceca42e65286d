"""Launcher of the relay `relay.c`, the lower bound: it only copies bytes. It is compiled on use."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from bench.servers import Bench, Server, Unmeasured

_SOURCE = Path(__file__).with_suffix(".c")


@contextlib.contextmanager
def relay(bench: Bench, triton: str) -> Iterator[Server]:
    """Run the relay, which needs only ports. Raises Unmeasured if there is no C compiler."""
    if (compiler := shutil.which("gcc") or shutil.which("cc")) is None:
        raise Unmeasured("there is no C compiler")
    built, port = bench.folder / "relay", bench.claims.take_free()
    command = [compiler, "-O2", "-o", str(built), str(_SOURCE)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Unmeasured(done.stderr[-200:])
    relayed = [str(built), str(port), triton.rpartition(":")[2]]
    with bench.running("relay", relayed, None, bench.cores.gateway) as child:
        yield Server("relay in C", child.pid, port)

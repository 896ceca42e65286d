"""Launcher of the relay `relay.c`, which is compiled on each use.

The relay only copies bytes between client and upstream. Its CPU time and latency are the lower
bound in the comparison of gateways (`bench.peers`).
"""

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
    """Compile and run the relay in front of a scripted Triton.

    Raises Unmeasured if the relay cannot be compiled.
    """
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

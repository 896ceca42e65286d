"""Instruction counts of a request and a token, by component, from valgrind's callgrind.

Instruction counts are stable: two runs differ by less than a percent, while CPU times differ by a
third. The counts depend on the build of Python and of its libraries. They do not include the
kernel's instructions.

See decision 058 in docs/decisions.
"""

from __future__ import annotations

import http.client
import os
import re
import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import orjson
import psutil

from bench.load import NUMBER
from bench.machine import ROOT
from bench.measure import chat, prompt
from bench.pace import BURST, STEPPED
from bench.protocols import PROTOCOLS
from bench.servers import Bench, Server, Unmeasured
from ops.local_stack.ports import LOCALHOST

_SIZES = 8, 750
# Work that a gateway does once or twice a second, such as polls, is subtracted on average only. The
# more requests and tokens are counted, the less it matters how many polls fell into a row.
_WARM, _COUNTED = 40, 120
_STREAMS = 8
_STEPPED, _BURSTING = 3000, 1024
_WITHIN_S = 120.0
_IDLE_S = 10.0
_CONTROL = "callgrind_control"
_COMMAND = ("valgrind", "--tool=callgrind", "--instr-atstart=no", "--callgrind-out-file={}.%p")

_PARTS = {
    "Python": ("libpython", "python"),
    "tokenizers": ("tokenizers",),
    "C library": ("libc.", "ld-linux", "libpthread"),
    "protobuf": ("_message",),
    "loop and HTTP parser": ("loop.", "parser."),
    "pydantic, orjson": ("_pydantic_core", "orjson"),
}
"""Filename prefixes of libraries, by the table's column that counts their instructions.

The column `other` counts the instructions in files with other names.
"""
_TEXT = b"~"  # text of `upstream.TOKEN`
_OBJECT = re.compile(r"(c?)ob=\((\d+)\)(?: (.*))?")


def instructions(bench: Bench) -> list[dict[str, Any]]:
    """Return rows with instruction counts for a request in each protocol, and for a token.

    Counts are in thousands. A measured request generates one token. Requests are sent one at a
    time, because a gateway under callgrind is forty times slower. In the row "a token, paced", the
    upstream sends a token only after the client has received the previous token, so each token is
    delivered separately. Raises Unmeasured if valgrind is not installed.
    """
    if shutil.which(_COMMAND[0]) is None or shutil.which(_CONTROL) is None:
        raise Unmeasured("valgrind is not installed")
    files = bench.folder / "callgrind"
    under = [part.format(files) for part in _COMMAND]
    # Turn Python's garbage collector off. It runs once in some hundred requests, and would add 4 %
    # to whichever row is being measured at that time.
    (bench.folder / "sitecustomize.py").write_text("import gc\n\ngc.disable()\n")
    path = os.pathsep.join([str(bench.folder), str(ROOT)])
    settings = {"PYTHONHASHSEED": "0", "PYTHONPATH": path}
    with (
        bench.upstream() as triton,
        bench.gateway(triton, under=under, settings=settings) as server,
        ThreadPoolExecutor(_STREAMS) as pool,
    ):
        upstreams = [p.pid for p in psutil.Process().children() if "bench.upstream" in p.cmdline()]
        counter = _Counter(server, upstreams, files, pool)
        sizes = _SIZES[:1] if bench.quick else _SIZES
        rows = [counter.request(name, size) for size in sizes for name in PROTOCOLS]
        rows += [
            counter.token("a token, paced", STEPPED, _STEPPED, streams=1),
            counter.token("a token, in burst", BURST, _BURSTING, streams=_STREAMS),
        ]
    return rows


@dataclass
class _Counter:
    """Client that counts the instructions of a gateway under callgrind.

    `files` is the prefix of callgrind's output files. `upstreams` are the process ids of the
    scripted Triton.
    """

    server: Server
    upstreams: Sequence[int]
    files: Path
    pool: ThreadPoolExecutor

    def __post_init__(self) -> None:
        self._lines = [
            http.client.HTTPConnection(LOCALHOST, self.server.port, timeout=_WITHIN_S)
            for _ in range(_STREAMS)
        ]
        self._numbers = count()
        self._idle: Counter[str] = Counter()
        self._control("-i", "on")
        self._idle = self._count([], self.server.path, b"", 0, at_least_s=_IDLE_S)

    def request(self, protocol: str, size: int) -> dict[str, Any]:
        path, make = PROTOCOLS[protocol]
        more = {"model": "demo", "stream": True, "temperature": 0}
        body = orjson.dumps(make(prompt(size), 1) | more)
        self._ask(self._lines[:1], path, body, _WARM)
        found = self._count(self._lines[:1], path, body, _COUNTED)
        return _row(f"{protocol}, {size} tokens", found, _COUNTED)

    def token(self, name: str, seed: int, tokens: int, *, streams: int) -> dict[str, Any]:
        """Return a row with the instructions per token of a chat.

        The instructions of a chat with one token are subtracted from those of a chat with `tokens`
        + 1 tokens. The difference is divided by the number of tokens.
        """
        short, long = (chat(seed=seed, tokens=n) for n in (1, tokens + 1))
        lines, path = self._lines[:streams], self.server.path
        step = self._step if seed == STEPPED else None
        self._ask(lines, path, long, 1, step)
        once = self._count(lines, path, short, 1, step)
        found = self._count(lines, path, long, 1, step)
        found.subtract(once)
        return _row(name, found, streams * tokens)

    def _count(
        self,
        lines: Sequence[http.client.HTTPConnection],
        path: str,
        body: bytes,
        times: int,
        on_token: Callable[[], None] | None = None,
        at_least_s: float = 0.0,
    ) -> Counter[str]:
        """Send the request `times` times on each connection, and count the gateway's instructions.

        Return the counts by column of the table. The instructions that an idle gateway executes in
        the same time are subtracted.
        """
        self._control("-z")
        began = time.monotonic()
        self._ask(lines, path, body, times, on_token)
        time.sleep(at_least_s)
        before = set(self._dumps())
        lasted_s = time.monotonic() - began
        self._control("-d")
        (dump,) = set(self._dumps()) - before
        found = _by_part(dump)
        found.subtract({part: int(n * lasted_s / _IDLE_S) for part, n in self._idle.items()})
        return found

    def _ask(
        self,
        lines: Sequence[http.client.HTTPConnection],
        path: str,
        body: bytes,
        times: int,
        on_token: Callable[[], None] | None = None,
    ) -> None:
        """Send the request `times` times on each connection."""

        def one(line: http.client.HTTPConnection) -> None:
            for _ in range(times):
                number = b"%08d" % next(self._numbers)
                headers = {"content-type": "application/json", "authorization": "Bearer unused"}
                line.request("POST", path, body.replace(NUMBER, number), headers)
                answer = line.getresponse()
                if answer.status != 200:
                    raise Unmeasured(f"{path}: {answer.status} {answer.read()[:200]!r}")
                while on_token is not None and (event := answer.readline()):
                    if _TEXT in event:
                        on_token()
                answer.read()

        list(self.pool.map(one, lines))

    def _step(self) -> None:
        for upstream in self.upstreams:
            os.kill(upstream, signal.SIGUSR1)

    def _dumps(self) -> Iterator[Path]:
        return self.files.parent.glob(f"{self.files.name}.*.*")

    def _control(self, *arguments: str) -> None:
        command = [_CONTROL, *arguments, str(self.server.pid)]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_WITHIN_S, check=False
        )
        if done.returncode:
            raise Unmeasured(f"{' '.join(command)}: {done.stdout}{done.stderr}")


def _row(what: str, found: Counter[str], times: int) -> dict[str, Any]:
    row: dict[str, Any] = {"thousand instructions of": what, "all": found.total() / times / 1e3}
    return row | {part: found[part] / times / 1e3 for part in (*_PARTS, "other")}


def _by_part(dump: Path) -> Counter[str]:
    """Return the instructions in one callgrind file, by column of the table.

    The Valgrind manual describes the format ("Callgrind Format Specification"). A line of digits
    has a position and a number of instructions. These instructions belong to the library that the
    closest `ob=` line above names. The line after a `calls=` line repeats the instructions of the
    called function, and is skipped.
    """
    names: dict[str, str] = {}
    found: Counter[str] = Counter()
    part, callees = "other", False
    for line in dump.read_text(encoding="utf-8", errors="replace").splitlines():
        if (told := _OBJECT.match(line)) is not None:
            of_callee, number, path = told.groups()
            if path is not None:
                names[number] = _part(Path(path).name)
            if not of_callee:
                part = names[number]
        elif line.startswith("calls="):
            callees = True
        elif line[:1] in "0123456789+-*" and line[:1]:
            if not callees:
                found[part] += int(line.split()[1])
            callees = False
    return found


def _part(file: str) -> str:
    return next((part for part, heads in _PARTS.items() if file.startswith(heads)), "other")

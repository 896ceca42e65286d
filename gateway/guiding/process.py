"""Worker process that compiles guides: JSON schemas, regular expressions and grammars.

A guide may crash the process. The next guide then starts a new process.

See decision 018 in docs/decisions.
"""

from __future__ import annotations

import json
import logging
import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from typing import IO, cast

from gateway.errors import Overloaded
from gateway.generation.options import Guide
from guides.kinds import Backend, Verdict

log = logging.getLogger(__name__)

# Maximum wall time in seconds to compile one guide. `guides.worker` has a lower limit of CPU time,
# so this limit is reached only on an overloaded machine.
_ANSWER_TIMEOUT_S = 30.0
_MAX_BYTES = 256 * 2**20
# Exit codes (negative signal numbers) of a worker process that was ended because a guide used too
# much CPU time, stack or memory. Any other signal came from outside the process, for example from
# the OOM killer.
_GUIDE_SIGNALS = (-signal.SIGXCPU, -signal.SIGSEGV, -signal.SIGABRT)
_TOO_MUCH = "it takes too much time or memory to compile"


class GuideProcess:
    """The worker process, which is started when the first guide is compiled.

    `verdict` blocks. Call it from one thread at a time.
    """

    def __init__(self, release: str = "") -> None:
        self._release = release
        self._process: subprocess.Popen[bytes] | None = None

    def verdict(self, guide: Guide, backend: Backend) -> Verdict:
        """Compile a guide in the worker process. Return a `Verdict` that accepts or refuses it.

        A guide that crashes the worker process is refused. Raise Overloaded if the process cannot
        be started or does not respond in time. Also raise it if the process ended, but the guide is
        not the cause.
        """
        process = self._ensure_started()
        stdin, stdout = cast(IO[bytes], process.stdin), cast(IO[bytes], process.stdout)
        best_effort = [path for path, _ in guide.best_effort]
        request = json.dumps([guide.type, guide.text, backend, best_effort]).encode() + b"\n"
        try:
            stdin.write(request)
            stdin.flush()
            answer = _read_line(stdout, time.monotonic() + _ANSWER_TIMEOUT_S)
        except (OSError, ValueError):  # the process has ended, or the gateway shuts down
            answer = b""
        if answer:
            (reason, text, left_out, more), size = json.loads(answer)
            if size > _MAX_BYTES:  # end a process that has become large: it does not free memory
                self.close()
            return Verdict(reason, text, tuple(left_out), more)
        if answer is None:
            self.close()
            raise _busy_error()
        code = process.wait()  # the process has closed its output, so this does not block
        log.warning("a guide of type %s ended its compiler: %d", guide.type, code)
        if code not in _GUIDE_SIGNALS:  # the guide is not the cause, so do not refuse it
            raise _busy_error()
        return Verdict(_TOO_MUCH, "")

    def close(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        if process.poll() is None:
            process.kill()
        for pipe in (process.stdin, process.stdout):
            with suppress(BrokenPipeError):  # `close` writes buffered data to the ended process
                cast(IO[bytes], pipe).close()
        process.wait()

    def _ensure_started(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        self.close()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "guides.worker", self._release],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                # Pass only PYTHONPATH: the process parses untrusted text, so it must not get API
                # keys and passwords from the environment.
                env={"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                # Start a new session, so that Ctrl-C in a terminal does not reach the process. The
                # gateway may need the process until it has shut down.
                start_new_session=True,
            )
        except OSError as error:
            log.error("guides cannot be compiled: %s", error)
            raise _busy_error() from error
        return self._process


def _read_line(stream: IO[bytes], deadline: float) -> bytes | None:
    """Return the next line of the process' output.

    Return b"" if the process has ended. Return None at `deadline`, in seconds of `time.monotonic`.
    """
    found = b""
    while not found.endswith(b"\n"):
        remaining_s = deadline - time.monotonic()
        if remaining_s <= 0 or not select.select([stream], [], [], remaining_s)[0]:
            return None
        piece = os.read(stream.fileno(), 65536)
        if not piece:
            return b""
        found += piece
    return found


def _busy_error() -> Overloaded:
    return Overloaded("The guide cannot be checked now; try again shortly.")

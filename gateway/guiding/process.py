"""The worker process that compiles guides. If a guide crashes the process, the next guide starts it
again.

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

# Limit of the wall time of one guide, for an overloaded machine. `guides.worker` limits the CPU
# time itself.
_ANSWER_TIMEOUT_S = 30.0
_MAX_BYTES = 256 * 2**20
# Exit codes of a worker that a guide ended: by too much CPU time, stack or memory. Any other signal
# came from outside, for example from the OOM killer.
_GUIDE_SIGNALS = (-signal.SIGXCPU, -signal.SIGSEGV, -signal.SIGABRT)
_TOO_MUCH = "it takes too much time or memory to compile"


class GuideProcess:
    """The worker process, which is started with the first guide.

    `verdict` blocks. Call it from one thread at a time.
    """

    def __init__(self, release: str = "") -> None:
        self._release = release
        self._process: subprocess.Popen[bytes] | None = None

    def verdict(self, guide: Guide, backend: Backend) -> Verdict:
        """Return the worker's verdict on a guide. A guide that ends the worker is refused.

        Raise Overloaded if the process cannot be started, the machine is too busy, or the process
        ended for a reason other than the guide.
        """
        process = self._ensure_started()
        stdin, stdout = cast(IO[bytes], process.stdin), cast(IO[bytes], process.stdout)
        best_effort = [path for path, _ in guide.best_effort]
        request = json.dumps([guide.type, guide.text, backend, best_effort]).encode() + b"\n"
        try:
            stdin.write(request)
            stdin.flush()
            answer = _read_line(stdout, time.monotonic() + _ANSWER_TIMEOUT_S)
        except (OSError, ValueError):  # The process has died, or the gateway shuts down
            answer = b""
        if answer:
            (reason, text, left_out, more), size = json.loads(answer)
            if size > _MAX_BYTES:  # The process does not free the memory of a large guide
                self.close()
            return Verdict(reason, text, tuple(left_out), more)
        if answer is None:
            self.close()
            raise _busy_error()
        code = process.wait()  # The process has closed its output, so this does not block
        log.warning("a guide of type %s ended its compiler: %d", guide.type, code)
        if code not in _GUIDE_SIGNALS:  # An exit without a signal is a bug of the gateway
            raise _busy_error()
        return Verdict(_TOO_MUCH, "")

    def close(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        if process.poll() is None:
            process.kill()
        for pipe in (process.stdin, process.stdout):
            with suppress(BrokenPipeError):  # closing flushes data that was not written yet
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
                # Pass no environment variables but the path: the process reads untrusted text and
                # must not know keys.
                env={"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                # Use a new session, so that Ctrl-C in a terminal reaches only the gateway, which
                # may need this process until it has shut down.
                start_new_session=True,
            )
        except OSError as error:
            log.error("guides cannot be compiled: %s", error)
            raise _busy_error() from error
        return self._process


def _read_line(stream: IO[bytes], deadline: float) -> bytes | None:
    """Return the next line of the process' output. Return b"" if the process has ended, None after
    `deadline`.
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

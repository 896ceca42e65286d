"""Runner that starts the ranks of a launch in the foreground, and ends all their processes.

See decision 095 in docs/decisions.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from ops.deployment.family import PROC, Member, ProcessFamily, reap_orphans
from ops.deployment.launch import SHM_PREFIX, Launch, command, environment, rank_arguments
from ops.local_stack.binaries import find_triton_server
from ops.local_stack.errors import StackError
from ops.local_stack.guard import Guard
from ops.local_stack.ports import LOCALHOST
from ops.local_stack.process import adopt_orphans
from ops.local_stack.servers import answers_ok
from ops.local_stack.shared_memory import SHARED_MEMORY
from ops.local_stack.stack import print_status

POLL_PERIOD = 0.1  # seconds
TRITON_EXIT_TIMEOUT = 30  # seconds; tritonserver's own default
EXIT_MARGIN = 5.0  # seconds after the exit timeout, for unloading the models
MPIRUN_GRACE = 3.0  # seconds from SIGTERM; mpirun kills its children within one second


def run_in_foreground(launch: Launch, *, find_server: bool, force: bool) -> int:
    """Start the ranks, and run until a signal arrives or a rank ends.

    Return the exit code: 0 after a signal, 1 if the ranks fail to start or end by themselves. When
    the function returns, all processes of the launch have ended. Only the line `ready: URL` is
    written to stdout.

    Args:
        launch: the launch.
        find_server: True to use this machine's tritonserver instead of `launch.tritonserver`.
        force: True to start even if a tritonserver is already running.
    """
    try:
        if (found := other_servers()) and not force:
            raise StackError(
                f"tritonserver runs already: processes {', '.join(map(str, found))}; stop it, or "
                "start another one with --force and other ports"
            )
        with tempfile.TemporaryDirectory(prefix="gateway-launch-") as folder:
            environ: Mapping[str, str] = os.environ
            if find_server:
                server = find_triton_server(Path(folder))
                environ = server.env
                executable, more = str(server.executable), (*server.arguments, *launch.more)
                launch = replace(launch, tritonserver=executable, more=more)
            with Ranks(launch, environ) as ranks:
                if ranks.start():
                    metrics = f"http://{LOCALHOST}:{launch.metrics_port}/metrics"
                    print(
                        f"ready: http://{LOCALHOST}:{launch.http_port}, "
                        f"gRPC {LOCALHOST}:{launch.grpc_port}, {metrics}",
                        flush=True,
                    )
                    ranks.watch()
    except StackError as error:
        print_status(f"error: {error}")
        return 1
    print_status("stopped")
    return 0


class Ranks:
    """The processes of a launch, as a context manager that ends all of them when it exits.

    Use this class in the main thread of a process without other child processes. The first SIGINT,
    SIGTERM or SIGHUP stops the ranks gracefully, the second immediately.
    """

    def __init__(self, launch: Launch, environ: Mapping[str, str]) -> None:
        """Prepare the launch without starting it. `environ` is the environment of the ranks."""
        self._launch = launch
        self._family = ProcessFamily()
        self._env = self._family.environment(dict(environ) | environment(launch))
        self._regions_before = _regions(launch.servers)
        self._process: subprocess.Popen[bytes] | None = None
        self._pids: dict[int, int] = {}
        self._signals = 0

    def __enter__(self) -> Ranks:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._count_signal)
        adopt_orphans()
        self._guard = Guard(self._sweep)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()
        self._guard.close()

    def start(self) -> bool:
        """Start the ranks. Return True when rank 0 is ready, False if a signal has arrived.

        Raises StackError if a rank cannot be started, or ends.
        """
        for option in ("http", "grpc", "metrics"):
            _check_port(option, getattr(self._launch, f"{option}_port"))
        try:
            # Start a new session: a terminal's Ctrl-C then reaches only this process. Send output
            # to stderr, because stdout is for the line `ready: URL`.
            self._process = subprocess.Popen(
                command(self._launch),
                env=self._env,
                stdin=subprocess.DEVNULL,
                stdout=sys.stderr.fileno(),
                start_new_session=True,
            )
        except OSError as error:
            hint = "; one rank needs no mpirun: --no-mpi" if self._launch.world_size == 1 else ""
            raise StackError(
                f"{error.filename} cannot be started: {error.strerror}"
                f"{hint if error.filename == 'mpirun' else ''}"
            ) from error
        ready = f"http://{LOCALHOST}:{self._launch.http_port}/v2/health/ready"
        while not answers_ok(ready):
            if not self._go_on():
                return False
        # Check that the ranks are still running. Otherwise, another server on the same port has
        # answered the readiness probe.
        self._check_process()
        self._pids = self._find_ranks()
        if 0 not in self._pids:
            raise StackError(f"another server answers on port {self._launch.http_port}")
        return True

    def watch(self) -> None:
        """Return when a signal arrives. Raises StackError if a rank ends before the signal."""
        while self._go_on():
            ended = [rank for rank, pid in self._pids.items() if not (PROC / str(pid)).exists()]
            if ended:
                raise StackError(f"rank {ended[0]} ended")

    def _go_on(self) -> bool:
        """Return False after a signal. Otherwise wait for one poll period and return True."""
        if self._signals:
            return False
        self._check_process()
        time.sleep(POLL_PERIOD)
        return True

    def _check_process(self) -> None:
        if self._process is not None and (status := self._process.poll()) is not None:
            name = Path(command(self._launch)[0]).name
            how = f"exit code {status}" if status >= 0 else f"killed by signal {-status}"
            raise StackError(f"{name} ended ({how}); its output above says why")

    def _find_ranks(self) -> dict[int, int]:
        """Return the process ids of the tritonservers, by rank."""
        wanted = {
            tuple(rank_arguments(self._launch, rank)): rank for rank in range(self._launch.servers)
        }
        found: dict[int, Member] = {}
        for member in self._family.members():
            for arguments, rank in wanted.items():
                if member.arguments[-len(arguments) :] != arguments:
                    continue
                # Prefer the shortest command line. A longer one belongs to a launcher, such as
                # mpirun, whose last arguments are the server's command line.
                if rank not in found or len(member.arguments) < len(found[rank].arguments):
                    found[rank] = member
        return {rank: member.pid for rank, member in found.items()}

    def _stop(self) -> None:
        if self._process is None:
            return
        if leader := self._pids.get(0):
            # Stop the leader first, so that it can finish its requests. mpirun would kill all ranks
            # at once, but the leader needs the other ranks until it has ended.
            _send(leader, signal.SIGTERM)
            grace = (self._launch.exit_timeout or TRITON_EXIT_TIMEOUT) + EXIT_MARGIN
            self._wait_for_end_of(leader, grace)
        self._process.poll()
        self._process.terminate()
        self._wait_for_end_of(self._process.pid, MPIRUN_GRACE)
        self._sweep()
        self._process.wait()

    def _wait_for_end_of(self, pid: int, grace: float) -> None:
        """Wait up to `grace` seconds until process `pid` ends. A second signal ends the wait.

        The wait also ends when the process that `start` has started, such as mpirun, has ended.
        """
        deadline = time.monotonic() + grace
        while (PROC / str(pid)).exists() and time.monotonic() < deadline and self._signals < 2:
            if self._process is not None and self._process.poll() is not None:
                return
            reap_orphans()
            time.sleep(0.02)

    def _sweep(self) -> None:
        """Kill the launch's remaining processes, then remove the shared memory that they left."""
        self._family.kill()
        new = _regions(self._launch.servers) - self._regions_before
        for region in new - _mapped_regions():
            region.unlink(missing_ok=True)

    def _count_signal(self, *_: object) -> None:
        self._signals += 1


def other_servers() -> list[int]:
    """Return the process ids of the tritonservers on this machine that are visible in /proc.

    Zombies are not returned; they may remain in a container without an init process.
    """
    found = []
    for path in PROC.glob("[0-9]*/stat"):
        with suppress(OSError):  # the process may have ended meanwhile
            head, _, rest = path.read_text(errors="replace").rpartition(")")
            pid, _, name = head.partition(" (")
            if name == "tritonserver" and rest.split()[0] not in "ZX":
                found.append(int(pid))
    return sorted(found)


def _check_port(option: str, port: int) -> None:
    """Raise StackError if the port is in use. Triton would check only after loading the models."""
    try:
        with socket.create_server(("", port)):
            pass
    except OSError as error:
        raise StackError(f"--{option}-port: {port} cannot be used: {error.strerror}") from error


def _send(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def _regions(world_size: int) -> set[Path]:
    """Return the shared memory files of the ranks below `world_size`.

    Files of other launches are included, because all launches use the same prefixes.
    """
    return {
        region
        for rank in range(world_size)
        for region in SHARED_MEMORY.glob(f"{SHM_PREFIX}{rank}_*")
    }


def _mapped_regions() -> set[Path]:
    """Return the shared memory files that running processes have mapped."""
    mapped = re.compile(rf"{SHARED_MEMORY}/{SHM_PREFIX}\S+")
    found: set[Path] = set()
    for folder in PROC.glob("[0-9]*"):
        try:
            maps = (folder / "maps").read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        found |= {Path(name) for name in mapped.findall(maps)}
    return found

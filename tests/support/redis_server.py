"""A real redis-server on a Unix socket, which tests kill, stop and flush."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import redis

from lora_store.redis import RedisSettings


class RedisServer:
    """A server without persistence: after `kill` and `start` its database is empty."""

    def __init__(self, folder: Path, config: Path | None = None) -> None:
        self._folder = folder
        self._config = [config] if config is not None else []
        self.url = f"unix://{folder}/redis.sock"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        binary = Path(sys.executable).parent / "redis-server"
        options = ["--port", "0", "--unixsocket", "redis.sock", "--save", ""]
        self._process = subprocess.Popen(
            [binary, *self._config, *options], cwd=self._folder, stdout=subprocess.DEVNULL
        )
        deadline = time.monotonic() + 60
        with self.client() as client:
            while time.monotonic() < deadline:
                try:
                    client.ping()
                except redis.AuthenticationError:
                    return  # the server answers, and requires the configured password
                except redis.ConnectionError:
                    time.sleep(0.01)
                else:
                    return
        raise TimeoutError("redis-server did not start")

    def client(self, password: str | None = None) -> redis.Redis:
        """Return a client for the test itself. The caller closes it."""
        return redis.Redis.from_url(self.url, password=password)

    def settings(self, *, ttl_s: int | None = None, timeout_s: float = 30.0) -> RedisSettings:
        """Return settings for a store, with a timeout that is long enough for a busy machine."""
        return RedisSettings(self.url, ttl_s=ttl_s, timeout_s=timeout_s)

    @contextlib.contextmanager
    def silent(self) -> Iterator[socket.socket]:
        """Replace the killed server with a listening socket that never answers."""
        path = self._folder / "redis.sock"
        path.unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
            listener.listen()
            yield listener
        path.unlink()

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


@contextlib.contextmanager
def running_redis(config: Path | None = None) -> Iterator[RedisServer]:
    # A short path, as for any Unix socket, so not in pytest's folder.
    folder = Path(tempfile.mkdtemp(prefix="redis-"))
    server = RedisServer(folder, config)
    try:
        server.start()
        yield server
    finally:
        server.kill()
        shutil.rmtree(folder)

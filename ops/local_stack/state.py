"""The state folder: its lock, and the file with the addresses of the running stack."""

from __future__ import annotations

import fcntl
import json
import os
import secrets
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from ops.local_stack.errors import StackError

FILE_NAME = "state.json"
ADMIN_KEY_FILE = "admin_key"
PRIVATE_FOLDERS = ("redis", "adapters", "logs")
"""Subfolders of the state folder that remain after a run, and may contain clients' data."""


@dataclass(frozen=True)
class StackState:
    """Addresses and process ids of a running stack: the contents of `state.json`.

    Attributes:
        gateway: the gateway's URL.
        triton_http: URL of Triton's HTTP endpoint.
        triton_metrics: URL of Triton's metrics page.
        triton_grpc: address of Triton's gRPC endpoint, HOST:PORT.
        redis: the URL of Redis.
        pids: process ids by the names redis, triton and gateway.
    """

    gateway: str
    triton_http: str
    triton_metrics: str
    triton_grpc: str
    redis: str
    pids: dict[str, int]

    @classmethod
    def read(cls, state_dir: Path) -> StackState:
        """Read the state of the running stack. Raises OSError if no stack is running."""
        return cls(**json.loads((state_dir / FILE_NAME).read_text(encoding="utf-8")))

    def write(self, state_dir: Path) -> None:
        """Write `state.json`, replacing an earlier file atomically."""
        draft = state_dir / f"{FILE_NAME}.new"
        draft.write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")
        os.replace(draft, state_dir / FILE_NAME)


def admin_key(state_dir: Path) -> str:
    """Return the gateway's admin key: GATEWAY_ADMIN_KEY if set, else the key in the state folder.

    If there is no key, generate one. Store the key in the folder's file `admin_key`, which only the
    owner can read.
    """
    path = state_dir / ADMIN_KEY_FILE
    key = os.environ.get("GATEWAY_ADMIN_KEY")
    if key is None and path.exists():
        return path.read_text(encoding="utf-8").strip()
    key = key or secrets.token_urlsafe(32)
    # Replace the file atomically. A full disk could otherwise truncate the key, and the next start
    # would use the truncated key.
    draft = path.with_suffix(".new")
    draft.unlink(missing_ok=True)
    with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(key)
    os.replace(draft, path)
    return key


class StateLock:
    """Exclusive lock on a state folder. The kernel releases the lock when this process ends."""

    def __init__(self, state_dir: Path) -> None:
        """Lock the folder, and create it if needed. Raises StackError if another stack uses it."""
        try:
            state_dir.mkdir(parents=True, exist_ok=True)
            for name in PRIVATE_FOLDERS:
                # Restrict the permissions of an existing folder: an earlier release of this project
                # did not.
                with suppress(FileNotFoundError):
                    (state_dir / name).chmod(0o700)
            self._file = (state_dir / "lock").open("a")
        except OSError as error:
            raise StackError(f"--state-dir: {state_dir} cannot be used: {error}") from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._file.close()
            raise StackError(
                f"--state-dir: another `gateway up` is using {state_dir}; stop that one or choose "
                "another folder"
            ) from error

    def __enter__(self) -> StateLock:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

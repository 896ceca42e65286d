"""Commands of npm, uv, mvn and go, with a time limit."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

INSTALL_LIMIT_S = 600.0
QUERY_LIMIT_S = 60.0


def run_client(
    command: Sequence[str | Path],
    limit_s: float = INSTALL_LIMIT_S,
    *,
    folder: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> str:
    """Return the standard output of a successful command.

    After `limit_s` seconds the command is killed with all processes of its session, for example
    packages' install scripts.

    Raises:
        subprocess.CalledProcessError: The command failed. `stderr` and `output` are text.
        subprocess.TimeoutExpired: The command took longer. Its output is text.
    """
    with subprocess.Popen(
        command,
        cwd=folder,
        env=None if environment is None else os.environ | environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        errors="replace",
        start_new_session=True,
    ) as process:
        try:
            output, errors = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired as error:
            os.killpg(process.pid, signal.SIGKILL)
            # TimeoutExpired has bytes even with an encoding, so its output is decoded here.
            error.stdout, error.stderr = _to_text(error.stdout), _to_text(error.stderr)
            raise
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command, output, errors)
    return output


def _to_text(printed: str | bytes | None) -> str:
    return printed.decode("utf-8", "replace") if isinstance(printed, bytes) else printed or ""

"""The wall clock of a process and its children, which a test can shift."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping
from functools import cache
from pathlib import Path

_SOURCE = Path(__file__).with_name("clock.c")
_BYTES = 8


@cache
def why_not() -> str | None:
    """Return why the clock cannot be shifted on this machine, or None if it can."""
    return None if shutil.which("gcc") else "there is no gcc to compile tests/chaos/clock.c with"


class WallClock:
    """A shiftable wall clock for processes that are started with `environment`.

    If `why_not` gives a reason, these processes use the real clock.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = folder / "clock"
        self.move(0)
        self.environment: Mapping[str, str] = {}
        if why_not() is None:
            library = folder / "clock.so"
            command = ["gcc", "-O2", "-shared", "-fPIC", "-o", str(library), str(_SOURCE), "-ldl"]
            subprocess.run(command, check=True)
            self.environment = {"LD_PRELOAD": str(library), "CHAOS_CLOCK": str(self._file)}

    def move(self, seconds: int) -> None:
        """Shift the clock by `seconds` from the real time. 0 restores it."""
        written = seconds.to_bytes(_BYTES, "little", signed=True)
        if not self._file.exists():
            self._file.write_bytes(written)
            return
        with self._file.open("r+b") as file:
            file.write(written)

"""Progress display of a run: one line that is updated on a terminal, or new lines in a file."""

from __future__ import annotations

import time
from typing import TextIO

_TERMINAL_S, _FILE_S = 0.2, 10.0


class Progress:
    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._is_terminal = out.isatty()
        self._said = 0.0

    def begin(self, title: str) -> None:
        """Show the title of a new step, such as the warm-up."""
        self._said = time.monotonic()
        self._write(title, end="" if self._is_terminal else "\n")

    def update(self, title: str, done: int, failed: int, total: int) -> None:
        now = time.monotonic()
        if now - self._said < (_TERMINAL_S if self._is_terminal else _FILE_S) and done < total:
            return
        self._said = now
        errors = f", {failed} failed" if failed else ""
        ends = done == total or not self._is_terminal
        self._write(f"{title}: {done} of {total}{errors}", end="\n" if ends else "")

    def _write(self, text: str, end: str) -> None:
        self._out.write((f"\r\x1b[K{text}" if self._is_terminal else text) + end)
        self._out.flush()

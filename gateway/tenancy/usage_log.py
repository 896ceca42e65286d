"""The usage log: one line of JSON for each admitted request, from which a bill can be made.

A line is one write to a file opened for appending, so several workers may share a file: each line
is written completely or not at all. It is written before the last byte of the answer is sent, so a
client that has seen the end of an answer finds it in the log.

See decision 094 in docs/decisions.
"""

from __future__ import annotations

import fcntl
import logging
import math
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import orjson

_CHECK_INTERVAL_S = 1.0

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageRecord:
    """Usage of one request.

    Attributes:
        id: unique, and part of the answer's own id.
        request_id: the `x-request-id` of the answer, which a client may choose.
        tenant: None where no key is needed.
        model: the base model's name, or that of the embedding or ranking model.
        adapter: the LoRA adapter's name, or None.
        adapter_version: ``NAME@DIGEST``, or None.
        prompt_tokens: tokens of the prompts sent to the engine; 0 if we failed before the first
            token.
        cached_tokens: prompt tokens that the engine had cached.
        completion_tokens: all generated tokens, also of choices that were not returned. Of a beam
            search, its steps times its beams; if the client aborted it, all that it asked for,
            since its progress is unknown.
        status: the HTTP status, of an error after the headers too; 499 if the client disconnected.
        finish: `stop`, `length` or `tool_calls` for each choice that came to its end.
        started, ended: seconds since 1970 of the admission and of the end of the answer; their
            difference is right even if the clock was set in between.
    """

    id: str
    request_id: str
    tenant: str | None
    model: str
    adapter: str | None
    adapter_version: str | None
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    status: int
    finish: tuple[str, ...]
    started: float
    ended: float


class UsageLog:
    """Appends complete lines to a file that other processes may write to as well.

    A line that cannot be written is counted and logged, not raised.
    """

    def __init__(self, path: Path, on_failure: Callable[[], object] = lambda: None) -> None:
        """Open the file. Raise OSError if that fails."""
        self._path = path
        self._on_failure = on_failure
        self._recent: list[bytes] = []
        """Lines since the file was last checked."""
        self._check_at = time.monotonic() + _CHECK_INTERVAL_S
        self._is_cut = False
        """True if the last line was cut and is still in the file."""
        self._open_problem = self._loss_problem = ""
        self._file = _open(path)

    @property
    def problem(self) -> str:
        """Why lines cannot be written to the file; empty if they can."""
        found = "; ".join(filter(None, (self._open_problem, self._loss_problem)))
        return found and f"the usage log {self._path} {found}"

    def write(self, usage: UsageRecord) -> None:
        if time.monotonic() >= self._check_at:
            self.reopen_if_moved()
        self._append(orjson.dumps(usage) + b"\n")

    def reopen_if_moved(self) -> None:
        """Continue in a new file if the old one was renamed or deleted.

        `write` calls this once a second, since the check costs as much as writing a line. Lines
        that went to a deleted file since the last check are written again. (If the deleted file was
        read before, such a line occurs twice, with one id. Otherwise it would be lost.)
        """
        self._check_at = time.monotonic() + _CHECK_INTERVAL_S
        lines, self._recent = self._recent, []
        held = os.fstat(self._file)
        with suppress(OSError):  # opening the file reports the problem
            if os.path.samestat(held, os.stat(self._path)):
                self._open_problem = ""
                return
        deleted = held.st_nlink == 0
        try:
            file = _open(self._path)
        except OSError as error:
            self._open_problem = f"cannot be opened again: {error.strerror}"
            log.error("the usage log cannot be opened again: %s: %s", self._path, error.strerror)
            for _ in lines if deleted else ():
                self._record_failure("its file was deleted")
            return
        os.close(self._file)
        self._file, self._is_cut, self._open_problem = file, False, ""
        for line in lines if deleted else ():
            self._append(line)

    def close(self) -> None:
        """Close the file. Later lines are lost, and counted as lost."""
        self.reopen_if_moved()
        self._check_at = math.inf
        file, self._file = self._file, -1
        os.close(file)

    def _append(self, line: bytes) -> None:
        text = b"\n" + line if self._is_cut else line
        try:
            written = os.write(self._file, text)
        except OSError as error:
            self._record_failure(error.strerror)
            return
        if written < len(text):
            self._is_cut = not self._blank(written)
            self._record_failure("it was cut")
            return
        self._is_cut, self._loss_problem = False, ""
        self._recent.append(line)

    def _blank(self, size: int) -> bool:
        """Replace the last `size` bytes by an empty line. Return True on success.

        A full disk has space for that, as those bytes exist. They are not truncated, since another
        process may have written behind them: its line then starts on a line of its own.
        """
        flags = fcntl.fcntl(self._file, fcntl.F_GETFL)
        try:
            start = os.lseek(self._file, 0, os.SEEK_CUR) - size
            # While O_APPEND is set, Linux appends wherever the offset is (pwrite(2), "BUGS").
            fcntl.fcntl(self._file, fcntl.F_SETFL, flags & ~os.O_APPEND)
            return os.pwrite(self._file, b" " * (size - 1) + b"\n", start) == size
        except OSError:  # a pipe, or a file system that never writes in place
            return False
        finally:
            fcntl.fcntl(self._file, fcntl.F_SETFL, flags)

    def _record_failure(self, reason: str | None) -> None:
        self._on_failure()
        self._loss_problem = f"loses records: {reason}"
        log.error("a usage record is lost: %s: %s", self._path, reason)


def _open(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o640)

"""The usage log: one line of JSON for each admitted request, as a basis for billing.

Each line is written by a single `write` to a file opened for appending, so lines of several workers
do not mix. A line that could be written only partly is overwritten with spaces. The line of a
request is written before the last byte of its response is sent. Every response that a client has
received completely is therefore in the log.

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
        id: unique id of the record, which is also a part of the response's id.
        request_id: the `x-request-id` of the response. Clients may choose this id, so it may not be
            unique.
        tenant: the tenant's name; None if requests need no key.
        model: name of the base model, or of the embedding or ranking model.
        adapter: the LoRA adapter's name; None without an adapter.
        adapter_version: the adapter's name and digest, ``NAME@DIGEST``; None without an adapter.
        prompt_tokens: tokens of the prompts that were sent to the engine; 0 if the service caused a
            failure before the first token.
        cached_tokens: prompt tokens that the engine had cached.
        completion_tokens: all generated tokens, including the tokens of choices that were not
            returned. For a beam search: the number of steps times the number of beams. For a beam
            search that the client aborted: the maximum, because the progress is unknown.
        status: the HTTP status, also of an error after the headers were sent; 499 if the client
            disconnected.
        finish: `stop`, `length` or `tool_calls` for each choice that was finished.
        started: time of the request's admission, in seconds since 1970.
        ended: time of the response's end, in seconds since 1970. The difference from `started` is
            right even if the system clock was set in between.
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
    """File of JSON lines, to which several processes may write.

    If a line cannot be written, `on_failure` is called and the error is logged, but not raised.
    """

    def __init__(self, path: Path, on_failure: Callable[[], object] = lambda: None) -> None:
        """Open the file. Raise OSError if the file cannot be opened.

        `on_failure` is called for each line that cannot be written.
        """
        self._path = path
        self._on_failure = on_failure
        self._recent: list[bytes] = []
        """Lines written since the last check whether the file was renamed or deleted."""
        self._check_at = time.monotonic() + _CHECK_INTERVAL_S
        self._is_cut = False
        """True if the file ends with an incomplete line that could not be overwritten."""
        self._open_problem = self._loss_problem = ""
        self._file = _open(path)

    @property
    def problem(self) -> str:
        """Error text if lines cannot be written to the file, else ""."""
        found = "; ".join(filter(None, (self._open_problem, self._loss_problem)))
        return found and f"the usage log {self._path} {found}"

    def write(self, usage: UsageRecord) -> None:
        if time.monotonic() >= self._check_at:
            self.reopen_if_moved()
        self._append(orjson.dumps(usage) + b"\n")

    def reopen_if_moved(self) -> None:
        """Open a new file if the old one was renamed or deleted.

        `write` calls this at most once a second, because the check takes as much time as writing a
        line. If the old file was deleted, the lines written since the last check are written to the
        new file; otherwise they would be lost. A program that had already read these lines from the
        old file then reads them twice, with the same ids.
        """
        self._check_at = time.monotonic() + _CHECK_INTERVAL_S
        lines, self._recent = self._recent, []
        held = os.fstat(self._file)
        with suppress(OSError):  # ignore an error here: opening the file below reports it
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
        """Close the file. Each later `write` fails, and its line is reported as lost."""
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
        """Overwrite an incomplete line at the end of the file. Return True on success.

        The last `size` bytes become a line of spaces. This works even if the disk is full. The file
        cannot be truncated instead, because another process may have appended its line meanwhile.
        """
        flags = fcntl.fcntl(self._file, fcntl.F_GETFL)
        try:
            start = os.lseek(self._file, 0, os.SEEK_CUR) - size
            # Clear O_APPEND: while it is set, Linux's pwrite ignores the offset and appends
            # (pwrite(2), "BUGS").
            fcntl.fcntl(self._file, fcntl.F_SETFL, flags & ~os.O_APPEND)
            return os.pwrite(self._file, b" " * (size - 1) + b"\n", start) == size
        except OSError:  # the file is a pipe, or its file system cannot overwrite data
            return False
        finally:
            fcntl.fcntl(self._file, fcntl.F_SETFL, flags)

    def _record_failure(self, reason: str | None) -> None:
        self._on_failure()
        self._loss_problem = f"loses records: {reason}"
        log.error("a usage record is lost: %s: %s", self._path, reason)


def _open(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o640)

"""The usage log: one line of JSON for each request that was let in, from which a bill can be made.

A line is one write to a file opened for appending, so that several workers may share a file: it is
there as a whole or not at all. It is written when the request ends, before the last byte of its
answer goes out: whoever has seen the end of an answer finds it in the log.
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

_LOOK_S = 1.0

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """One request.

    Attributes:
        id: unique, and part of the answer's own id.
        request_id: the `x-request-id` of the answer, which a client may choose.
        tenant: None where no key is needed.
        model: the base model's name, or that of the model that made embeddings or ranked.
        adapter: the LoRA adapter's name, or None.
        adapter_version: ``NAME@DIGEST``, or None.
        prompt_tokens: of the prompts that the engine was given; 0 when we failed before the first
            token.
        cached_tokens: those of the prompt that the engine had kept.
        completion_tokens: all that were generated, also for choices that were not returned; of a
            beam search, its steps times its beams, and of one that the client broke off, all that
            it asked for, since nobody can tell how far it came.
        status: the HTTP status, of an error after the headers too; 499 when the client left.
        finish: of each choice that came to its end, `stop`, `length` or `tool_calls`.
        started, ended: seconds since 1970, when it was let in and when its answer had ended; their
            difference is true also where the clock was set meanwhile.
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
    """Appends whole lines to the file of one name, which other processes may write to as well.

    A line that cannot be written is counted and told, not raised.
    """

    def __init__(self, path: Path, on_failure: Callable[[], object] = lambda: None) -> None:
        """Raises OSError when the file cannot be opened."""
        self._path = path
        self._on_failure = on_failure
        self._recent: list[bytes] = []
        """The lines since the file was last looked at."""
        self._look_at = time.monotonic() + _LOOK_S
        self._cut = False
        """Whether the last line was cut and is still there."""
        self._unopened = self._lost = ""
        self._file = _opened(path)

    @property
    def problem(self) -> str:
        """Why lines cannot be written to the file; empty if they can."""
        found = "; ".join(filter(None, (self._unopened, self._lost)))
        return found and f"the usage log {self._path} {found}"

    def write(self, usage: Usage) -> None:
        if time.monotonic() >= self._look_at:
            self.follow()
        self._append(orjson.dumps(usage) + b"\n")

    def follow(self) -> None:
        """Goes on in a new file where the old one was renamed or deleted.

        `write` calls it once a second, since to look costs as much as to write a line. What went to
        a deleted file since the last time is written again. (Somebody may have read it before:
        then the line is there twice, with one id. It would be lost otherwise.)
        """
        self._look_at = time.monotonic() + _LOOK_S
        lines, self._recent = self._recent, []
        held = os.fstat(self._file)
        with suppress(OSError):  # what is wrong, opening it tells
            if os.path.samestat(held, os.stat(self._path)):
                self._unopened = ""
                return
        deleted = held.st_nlink == 0
        try:
            file = _opened(self._path)
        except OSError as error:
            self._unopened = f"cannot be opened again: {error.strerror}"
            log.error("the usage log cannot be opened again: %s: %s", self._path, error.strerror)
            for _ in lines if deleted else ():
                self._failed("its file was deleted")
            return
        os.close(self._file)
        self._file, self._cut, self._unopened = file, False, ""
        for line in lines if deleted else ():
            self._append(line)

    def close(self) -> None:
        """Lines after this are lost, and counted so."""
        self.follow()
        self._look_at = math.inf
        file, self._file = self._file, -1
        os.close(file)

    def _append(self, line: bytes) -> None:
        text = b"\n" + line if self._cut else line
        try:
            written = os.write(self._file, text)
        except OSError as error:
            self._failed(error.strerror)
            return
        if written < len(text):
            self._cut = not self._blanked(written)
            self._failed("it was cut")
            return
        self._cut, self._lost = False, ""
        self._recent.append(line)

    def _blanked(self, size: int) -> bool:
        """Makes the `size` bytes that were just written an empty line.

        A full disk has room for that, as those bytes are there. They are not cut off, since another
        process may have written behind them by now: so its line is a line of its own.
        """
        flags = fcntl.fcntl(self._file, fcntl.F_GETFL)
        try:
            start = os.lseek(self._file, 0, os.SEEK_CUR) - size
            # While it is set, Linux appends wherever the offset is (pwrite(2), "BUGS").
            fcntl.fcntl(self._file, fcntl.F_SETFL, flags & ~os.O_APPEND)
            return os.pwrite(self._file, b" " * (size - 1) + b"\n", start) == size
        except OSError:  # a pipe, or a file system that never writes in place
            return False
        finally:
            fcntl.fcntl(self._file, fcntl.F_SETFL, flags)

    def _failed(self, reason: str | None) -> None:
        self._on_failure()
        self._lost = f"loses records: {reason}"
        log.error("a usage record is lost: %s: %s", self._path, reason)


def _opened(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o640)

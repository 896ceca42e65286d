"""The usage log: one line of JSON for each request that was let in, from which a bill can be made.

A line is one write to a file opened for appending, so that several workers may share a file. It is
written when the request ends, before the last byte of its answer goes out: whoever has seen the end
of an answer finds it in the log.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import orjson

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """One request.

    Attributes:
        id: unique, and part of the answer's own id.
        request_id: the `x-request-id` of the answer, which a client may choose.
        tenant: None where no key is needed.
        model: the base model's name.
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
        started, ended: seconds since 1970, when it was let in and when its answer had ended.
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
    """Appends to one file. A line that cannot be written is counted and told, not raised."""

    def __init__(self, path: Path, on_failure: Callable[[], object] = lambda: None) -> None:
        """Raises OSError when the file cannot be opened."""
        self._path = path
        self._on_failure = on_failure
        self._file = _opened(path)
        self._cut = False

    def write(self, usage: Usage) -> None:
        line = orjson.dumps(usage) + b"\n"
        if self._cut:
            line = b"\n" + line  # after a line that a full disk cut, so that only that one is lost
        try:
            self._cut = os.write(self._file, line) < len(line)
        except OSError as error:
            self._failed(error.strerror)
            return
        if self._cut:
            self._failed("the line was cut")

    def _failed(self, reason: str | None) -> None:
        self._on_failure()
        log.error("a usage record is lost: %s: %s", self._path, reason)

    def reopen(self) -> None:
        """Goes on in a new file after the old one was renamed; in the old one if that fails."""
        try:
            file = _opened(self._path)
        except OSError as error:
            log.error("the usage log stays where it was: %s: %s", self._path, error.strerror)
            return
        os.close(self._file)
        self._file, self._cut = file, False

    def close(self) -> None:
        """Lines after this are lost, and counted so."""
        file, self._file = self._file, -1
        os.close(file)


def _opened(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o640)

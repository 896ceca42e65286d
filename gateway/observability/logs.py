"""Logging to standard error, as text or JSON.

Prompts, completions and keys are never logged.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import orjson

from gateway.observability.request_context import current, current_id

LogFormat = Literal["text", "json"]

_STDERR = 2
# Loggers whose info and debug messages are suppressed. These messages contain secrets: signed URLs,
# and headers with session tokens.
_NOISY_LOGGERS = (
    "httpx",
    "httpcore",
    "urllib3",
    "botocore",
    "aiobotocore",
    "aiohttp",
    "s3fs",
    "fsspec",
)
_FORMATTER = logging.Formatter()


class _LogLine(NamedTuple):
    """A log line.

    `level` is a level name of Python's `logging`, such as "INFO". `facts` are fields that only the
    JSON format writes.
    """

    created: float
    level: str
    logger: str
    message: str
    error: Any = None
    facts: Mapping[str, object] = {}


class _Handler(logging.Handler):
    """Handler that writes each log line to standard error in one call of `os.write`.

    Several workers write to the same standard error, and their lines must not mix.
    """

    def __init__(self, form: Callable[[_LogLine], bytes]) -> None:
        super().__init__()
        self._form = form

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self.write(
                _LogLine(
                    *(record.created, record.levelname, record.name, record.getMessage()),
                    *(record.exc_info, getattr(record, "facts", {})),
                )
            )
        except Exception:
            self.handleError(record)

    def write(self, line: _LogLine) -> None:
        """Write a line to standard error. Raise OSError if this fails."""
        os.write(_STDERR, self._form(line))


def configure_logging(level: str, form: LogFormat = "text") -> None:
    """Configure the format and level of all loggers of this process."""
    # Prevent `logging` from collecting the caller's file, thread and process for each record: the
    # log format does not show them (Python's logging HOWTO, "Optimization").
    logging._srcfile = None
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    handler = _Handler(_format_json if form == "json" else _format_text)
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    # Always write the audit log, even if `level` is "warning" or "error".
    logging.getLogger("gateway.audit").setLevel(logging.INFO)
    for name in _NOISY_LOGGERS:
        logging.getLogger(name).setLevel(logging.WARNING)


def log_request(log: logging.Logger, facts: dict[str, object]) -> None:
    """Log a request in one line. `facts` is the result of `RequestContext.facts`."""
    if not log.isEnabledFor(logging.INFO):
        return
    status, took = facts["status"], facts["duration_ms"]
    message = f"{facts['method']} {facts['path']} {status} {took:.1f} ms"
    handlers = log.root.handlers
    if len(handlers) == 1 and isinstance(ours := handlers[0], _Handler):
        # Fast path: do not create a `LogRecord`, because creating and routing it would double the
        # time of this function.
        try:
            ours.write(_LogLine(time.time(), "INFO", log.name, message, facts=facts))
            return
        except OSError:
            pass  # continue with `log.info`, which reports the error
    log.info(message, extra={"facts": facts})


def _format_text(line: _LogLine) -> bytes:
    second = int(line.created)
    when = f"{_local_time(second)},{int((line.created - second) * 1000):03d}"
    text = f"{when} {line.level} {line.logger} [{current_id()}]: {line.message}"
    if line.error:
        text += "\n" + _FORMATTER.formatException(line.error)
    return text.encode("utf-8", "backslashreplace") + b"\n"


@lru_cache(maxsize=1)
def _local_time(second: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(second))


def _format_json(line: _LogLine) -> bytes:
    """Format a line as JSON.

    The field `time` is in RFC 3339 format and UTC. The field `exception` is an error's traceback.
    """
    context = current.get()
    fields: dict[str, object] = {
        "time": datetime.fromtimestamp(line.created, UTC),
        "level": line.level.lower(),
        "logger": line.logger,
        "message": _escape_surrogates(line.message),
        "request_id": None if context is None else context.request_id,
        "trace_id": None if context is None else context.trace_id,
    }
    if line.error:
        fields["exception"] = _escape_surrogates(_FORMATTER.formatException(line.error))
    return orjson.dumps(
        {**fields, **line.facts}, option=orjson.OPT_UTC_Z | orjson.OPT_APPEND_NEWLINE
    )


def _escape_surrogates(text: str) -> str:
    """Return `text` with lone surrogates escaped.

    Python uses lone surrogates for bytes of file names that are not UTF-8.
    """
    return text.encode("utf-8", "backslashreplace").decode("utf-8")

"""Log lines of one process, on standard error: text or JSON, each in one write.

Prompts, completions and keys are never logged anywhere.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import lru_cache
from typing import Literal

import orjson

from gateway.observability.request_context import current, current_id

LogFormat = Literal["text", "json"]

_STDERR = 2
# With what they send and get they log secrets: signed URLs, and headers with session tokens.
_CHATTY = ("httpx", "httpcore", "urllib3", "botocore", "aiobotocore", "aiohttp", "s3fs", "fsspec")
_FORMATTER = logging.Formatter()


class _Handler(logging.Handler):
    """Writes bytes, a line in one call, so that the lines of several workers do not mix."""

    def __init__(self, line: Callable[[logging.LogRecord], bytes]) -> None:
        super().__init__()
        self._line = line

    def emit(self, record: logging.LogRecord) -> None:
        try:
            os.write(_STDERR, self._line(record))
        except Exception:
            self.handleError(record)


def configure_logging(level: str, form: LogFormat = "text") -> None:
    """Lines of all loggers, by this function alone."""
    # What no line shows need not be found out for each (logging's HOWTO, "Optimization").
    logging._srcfile = None
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    handler = _Handler(_json_line if form == "json" else _text_line)
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    # Who did what is told at every level.
    logging.getLogger("gateway.audit").setLevel(logging.INFO)
    for name in _CHATTY:
        logging.getLogger(name).setLevel(logging.WARNING)


def log_request(log: logging.Logger, facts: dict[str, object]) -> None:
    """The one line of a request; `facts` are those of `RequestContext.facts`."""
    args = (facts["method"], facts["path"], facts["status"], facts["duration_ms"])
    log.info("%s %s %s %.1f ms", *args, extra={"facts": facts})


def _text_line(record: logging.LogRecord) -> bytes:
    when = f"{_local_time(int(record.created))},{int(record.msecs):03d}"
    line = f"{when} {record.levelname} {record.name} [{current_id()}]: {record.getMessage()}"
    if record.exc_info:
        line += "\n" + _FORMATTER.formatException(record.exc_info)
    return line.encode("utf-8", "backslashreplace") + b"\n"


@lru_cache(maxsize=1)
def _local_time(second: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(second))


def _json_line(record: logging.LogRecord) -> bytes:
    """`time` is RFC 3339 in UTC; an error's traceback is in `exception`."""
    context = current.get()
    line: dict[str, object] = {
        "time": datetime.fromtimestamp(record.created, UTC),
        "level": record.levelname.lower(),
        "logger": record.name,
        "message": _valid(record.getMessage()),
        "request_id": None if context is None else context.request_id,
        "trace_id": None if context is None else context.trace_id,
    }
    if record.exc_info:
        line["exception"] = _valid(_FORMATTER.formatException(record.exc_info))
    facts: dict[str, object] = getattr(record, "facts", {})
    return orjson.dumps(line | facts, option=orjson.OPT_UTC_Z | orjson.OPT_APPEND_NEWLINE)


def _valid(text: str) -> str:
    """`text` as UTF-8 can hold it: a file's name may have bytes that are none."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")

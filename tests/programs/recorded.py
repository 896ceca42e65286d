"""Requests of programs as stored in tests/data/requests, without private data or long texts."""

from __future__ import annotations

import json
import platform
import re
import shutil
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tests.programs.installed import TREE, Installed
from tests.programs.program import Result
from tests.programs.recorder import Message

FOLDER = TREE / "tests" / "data" / "requests"
_HEADERS = (
    *("accept", "anthropic-beta", "anthropic-version", "connection", "content-type"),
    *("openai-beta", "originator", "sec-websocket-version", "upgrade", "user-agent", "x-app"),
)
_TEXTS = frozenset(("content", "description", "input", "instructions", "output", "text"))
"""Fields whose strings are prose. Schemas, grammars and arguments are stored completely."""
_MAX_TEXT_CHARS = 400
_MAX_REQUESTS = 6
"""Maximum number of stored requests per path of a program."""
_STATEFUL = re.compile('"(?:item_reference|previous_response_id|conversation)"')
"""Fields that refer to state of the gateway that answered the previous request."""
_RANDOM = re.compile(
    r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}|(?<![0-9a-f])[0-9a-f]{32,64}(?![0-9a-f])"
    r"|(?<=word-)[0-9a-f]{8}|(?<=call_)[0-9A-Za-z]{24}"
)


def record(installed: Installed, result: Result, workspace: Path) -> None:
    """Replace the stored requests of a program with those of a run in the folder `workspace`."""
    name = installed.program.name
    for old in FOLDER.glob(f"{name}-[0-9]*"):
        shutil.rmtree(old)
    folder = FOLDER / f"{name}-{installed.version}"
    folder.mkdir(parents=True)
    seen: dict[str, dict[str, Any]] = {}
    for exchange in result.exchanges:
        if exchange.response is not None:
            stored = _stored(exchange.request, exchange.response.status, workspace)
            of_path = [each for each in seen.values() if each["path"] == stored["path"]]
            if len(of_path) < _MAX_REQUESTS and not _STATEFUL.search(json.dumps(stored)):
                seen.setdefault(_kind(stored), stored)
    for number, stored in enumerate(seen.values(), start=1):
        text = json.dumps(stored, indent=1, ensure_ascii=False) + "\n"
        (folder / f"{number}.json").write_text(text, encoding="utf-8")


def _stored(request: Message, status: int, workspace: Path) -> dict[str, Any]:
    headers = {name: request.headers[name] for name in _HEADERS if name in request.headers}
    stored: dict[str, Any] = {"method": request.method, "path": request.path}
    stored |= {"status": status, "headers": headers}
    text = _without_private(json.dumps(stored | _body(request)), workspace)
    return _shortened(json.loads(text))


def _body(request: Message) -> dict[str, Any]:
    return {"body": json.loads(request.body)} if request.body else {}


def _kind(stored: dict[str, Any]) -> str:
    """Return a key of the request's structure. Requests with equal keys are stored once."""
    body = stored.get("body", {})
    turns = body.get("messages", body.get("input"))
    roles = [each.get("role", each.get("type")) for each in turns] if isinstance(turns, list) else 0
    tools = [each.get("name") for each in body.get("tools", ())]
    return json.dumps([stored["method"], stored["path"], sorted(body), roles, tools])


def _without_private(text: str, workspace: Path) -> str:
    """Replace paths, hosts, dates and random ids in JSON text."""
    today = datetime.now(UTC)
    for private, placeholder in (
        (str(workspace), "/home/user"),
        (str(TREE), "/gateway"),
        (platform.release(), "6.1.0"),
        (platform.version(), "#1 SMP"),
        (f"{today:%A, %B} {today.day}, {today:%Y}", "Thursday, January 1, 2026"),
        (f"{today:%a %b %d %Y}", "Thu Jan 01 2026"),
        (f"{today:%Y-%m-%d}", "2026-01-01"),
    ):
        text = text.replace(private, placeholder)
    # A short host name may be part of other words and of ids, so only complete words match. In JSON
    # text, the n of \n is no part of a word.
    host = rf"(?:(?<!\w)|(?<=\\[nrt])){re.escape(platform.node())}(?!\w)"
    text = re.sub(host, "host", text)
    text = re.sub(r"127\.0\.0\.1:[0-9]+", "127.0.0.1:9000", text)
    text = re.sub(r"\b1[0-9]{12}\b", "1767225600000", text)
    numbers: dict[str, int] = {}

    def number(found: re.Match[str]) -> str:
        """Return a number formatted like the random id. Equal ids get equal numbers."""
        digits = f"{numbers.setdefault(found[0], len(numbers) + 1):012x}"
        length = len(found[0].replace("-", ""))
        filled = iter(digits[-length:].rjust(length, "0"))
        return "".join(each if each == "-" else next(filled) for each in found[0])

    return _RANDOM.sub(number, text)


def _shortened(value: Any, name: str = "") -> Any:
    if isinstance(value, dict):
        return {key: _shortened(each, key) for key, each in value.items()}
    if isinstance(value, list):
        return [_shortened(each, name) for each in value]
    if isinstance(value, str) and name in _TEXTS and len(value) > _MAX_TEXT_CHARS:
        return f"{value[:_MAX_TEXT_CHARS]} [{len(value)} characters]"
    return value

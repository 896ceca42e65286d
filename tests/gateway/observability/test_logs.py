"""Log lines about requests, and secrets that must never be logged."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from gateway.database.opening import make_database
from gateway.observability.audit import Audit, read_entries
from gateway.observability.logs import LogFormat, configure_logging, log_request
from gateway.observability.request_context import RequestContext, current
from ops.commands.up import DEMO_ADAPTERS
from tests.support.fake_triton import FakeTriton, serving
from tests.support.gateway_process import GatewayProcess, tenant, write_config
from tests.support.in_process import ids_of, running, save_tokenizer
from tests.support.local_stack import Stack
from tests.support.patience import PATIENCE_S

KEY, WRONG, ADMIN = (
    "sk-the-key-of-acme",
    "sk-a-key-of-nobody",
    "the-key-of-an-admin-has-enough-characters",
)
PROMPT = "Zanzibar pineapples at dawn"
TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = f"00-{TRACE}-b7ad6b7169203331-01"
COMMON = {"time", "level", "logger", "message", "request_id", "trace_id"}
OF_A_REQUEST = {
    "method", "path", "status", "error", "tenant", "model", "adapter_version", "replica",
    "prompt_tokens", "completion_tokens", "finish", "continued", "ttft_ms", "duration_ms",
}  # fmt: skip


@pytest.fixture(params=["text", "json"])
def form(request: pytest.FixtureRequest) -> LogFormat:
    form: LogFormat = request.param
    return form


@pytest.fixture(autouse=True)
def _logging_as_it_was() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = handlers, level


def _lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_a_line_of_json(capfd: pytest.CaptureFixture[str]) -> None:
    configure_logging("info", "json")
    before = datetime.now(UTC)
    token = current.set(RequestContext("mine", {"traceparent": PARENT}))
    log = logging.getLogger("gateway.some")
    log.debug("not wanted")
    try:
        raise ValueError("two\nlines")
    except ValueError:
        log.exception("%s of %d: \udc80", "one\nthing", 3)
    current.reset(token)
    log.warning("outside")
    inside, outside = _lines(capfd.readouterr().err)
    assert set(outside) == COMMON
    assert set(inside) == COMMON | {"exception"}
    assert inside["message"] == "one\nthing of 3: \\udc80"
    assert (inside["level"], inside["logger"]) == ("error", "gateway.some")
    assert (inside["request_id"], inside["trace_id"]) == ("mine", TRACE)
    assert (outside["request_id"], outside["trace_id"]) == (None, None)
    assert inside["exception"].startswith("Traceback")
    assert inside["exception"].endswith("ValueError: two\nlines")
    assert inside["time"].endswith("Z")
    written = datetime.fromisoformat(inside["time"])
    assert before - timedelta(seconds=1) < written <= datetime.now(UTC)


def test_a_line_of_text(capfd: pytest.CaptureFixture[str]) -> None:
    configure_logging("info", "text")
    token = current.set(RequestContext("mine"))
    logging.getLogger("gateway.some").info("%s", "\udc80")
    current.reset(token)
    logging.getLogger("gateway.some").error("outside")
    inside, outside = capfd.readouterr().err.splitlines()
    assert inside.endswith(" INFO gateway.some [mine]: \\udc80")
    assert outside.endswith(" ERROR gateway.some [-]: outside")


def test_a_line_that_cannot_be_written(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, form: LogFormat
) -> None:
    """The line is lost, but logging raises no error: a full disk must not fail a request."""
    configure_logging("info", form)
    with open("/dev/full", "wb") as full:
        monkeypatch.setattr("gateway.observability.logs._STDERR", full.fileno())
        log_request(logging.getLogger("gateway.some"), RequestContext("x").facts("GET", "/", 200))
    assert "No space left on device" in capfd.readouterr().err


def test_the_level_holds_for_requests(capfd: pytest.CaptureFixture[str], form: LogFormat) -> None:
    configure_logging("warning", form)
    log_request(logging.getLogger("gateway.some"), RequestContext("x").facts("GET", "/", 200))
    assert capfd.readouterr().err == ""


async def test_an_error_behind_the_headers_is_in_the_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    save_tokenizer(tmp_path)
    servicer = FakeTriton(tokens=ids_of(tmp_path, "hello"), fault="abort", step=2)
    async with serving(servicer) as endpoint, running(tmp_path, endpoint) as (client, _, _):
        configure_logging("info", "json")
        body = {"model": "m", "prompt": "xyz", "stream": True}
        await client.post("/v1/completions", json=body)
        await client.post("/v1/completions", json=body | {"model": "another"})
        logging.getLogger().handlers.clear()
    found = [line for line in _lines(capfd.readouterr().err) if "method" in line]
    late, unknown = found
    assert (late["status"], late["error"], late["finish"]) == (503, "EngineUnavailable", [])
    assert (late["prompt_tokens"], late["completion_tokens"]) == (3, 2)
    assert (unknown["status"], unknown["error"], unknown["model"]) == (404, "ModelNotFound", None)
    assert unknown["prompt_tokens"] is None


@pytest.mark.token_mode_only("asks with token ids")
def test_a_whole_run(stack: Stack, tmp_path: Path, form: LogFormat) -> None:
    """Requests to the real engine, logged at level debug, leave no secret in any line."""
    config = write_config(tmp_path / "c.yaml", tenant("acme", KEY))
    adapter = "acme/zh"
    settings = {
        "log_format": form,
        "log_level": "debug",
        "config": config,
        "admin_key": ADMIN,
        "adapters": json.dumps({adapter: str(DEMO_ADAPTERS / "zh")}),
    }
    with (
        GatewayProcess(tmp_path / "g", stack, **settings) as gateway,
        gateway.client(KEY) as client,
    ):
        message = {"role": "user", "content": PROMPT}
        chat = {"model": "demo", "messages": [message], "max_tokens": 4, "temperature": 0}
        traced = {"traceparent": PARENT, "x-request-id": "mine-1"}
        answer = client.post("/v1/chat/completions", json=chat, headers=traced)
        assert answer.status_code == 200
        said = answer.json()["choices"][0]["message"]["content"]
        used = answer.json()["usage"]
        text = {"model": adapter, "prompt": PROMPT, "max_tokens": 2, "n": 2, "stream": True}
        assert client.post("/v1/completions", json=text).status_code == 200
        for wrong in (
            {"logit_bias": {PROMPT: 1}},
            {"messages": PROMPT},
            {"model": PROMPT},
            {"chat_template_kwargs": PROMPT},
        ):
            assert client.post("/v1/chat/completions", json=chat | wrong).status_code in (400, 404)
        unknown = client.post("/v1/chat/completions", json=chat | {PROMPT: PROMPT})
        assert unknown.headers["x-ignored-parameters"].startswith("Zanzibar")
        assert client.get("/v1/models", headers={"authorization": WRONG}).status_code == 401
        assert client.post("/v1/completions", content=PROMPT).status_code == 400
        admin = {"authorization": f"Bearer {ADMIN}"}
        assert client.get("/v1/adapters", headers=admin).status_code == 200
        assert client.get(f"/{PROMPT}?key={KEY}").status_code == 404
    log = gateway.text
    assert len(said) > 3
    for secret in (KEY, WRONG, ADMIN, "pineapple", "Zanzibar", said):
        assert secret not in log
    if form == "text":
        assert log.count("POST /v1/chat/completions 200 ") == 2
        return
    lines = _lines(log)
    requests = [line for line in lines if line["logger"] == "gateway.requests"]
    assert all(set(line) == COMMON | OF_A_REQUEST for line in requests)
    (line,) = [line for line in requests if line["request_id"] == "mine-1"]
    assert (line["method"], line["path"], line["status"]) == ("POST", "/v1/chat/completions", 200)
    assert (line["tenant"], line["model"], line["adapter_version"]) == ("acme", "demo", None)
    assert (line["trace_id"], line["replica"]) == (TRACE, stack.triton_grpc)
    assert line["prompt_tokens"] == used["prompt_tokens"]
    assert line["completion_tokens"] == used["completion_tokens"]
    assert line["finish"] == [answer.json()["choices"][0]["finish_reason"]]
    assert 0 < line["ttft_ms"] <= line["duration_ms"] < 60_000
    (line,) = [line for line in requests if line["adapter_version"] is not None]
    assert line["adapter_version"].startswith(f"{adapter}@")
    assert line["completion_tokens"] == 4
    assert len(line["finish"]) == 2
    health = [line for line in requests if line["path"] == "/health/ready"]
    assert all(line["tenant"] is line["replica"] is line["ttft_ms"] is None for line in health)


async def test_an_audit_line_is_one_line(
    capfd: pytest.CaptureFixture[str], form: LogFormat, tmp_path: Path
) -> None:
    """Line breaks in a name are escaped, and the log level does not hide audit lines."""
    configure_logging("error", form)
    database = make_database(tmp_path, None, connections=1, timeout_s=PATIENCE_S)
    await database.open()
    audit = Audit("sha256:12345678", database)
    with pytest.raises(ValueError, match="told"):
        async with audit.action("adapters.add", "two\nlines \udc80", None):
            raise ValueError("told")
    async with audit.action("adapters.add", "zh", {"served": "a"}) as action:
        action.after = {"served": "b"}
    rows = await database.read(partial(read_entries, before=None, limit=10))
    assert rows is not None
    assert {(row.target, row.outcome, row.after) for row in rows} == {
        ("two\nlines \\udc80", "ValueError", b"null"),
        ("zh", "done", b'{"served":"b"}'),
    }
    await database.close()
    failed, done = capfd.readouterr().err.splitlines()
    if form == "text":
        said = "INFO gateway.audit [-]: sha256:12345678 adapters.add "
        assert failed.endswith(
            said + "'two\\nlines \\\\udc80': ValueError, before null, after null"
        )
        assert done.endswith(said + '\'zh\': done, before {"served":"a"}, after {"served":"b"}')
        return
    line = json.loads(failed)
    assert (line["target"], line["outcome"]) == ("two\nlines \\udc80", "ValueError")
    line = json.loads(done)
    assert (line["before"], line["after"]) == ({"served": "a"}, {"served": "b"})

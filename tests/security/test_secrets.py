"""Keys and prompts of clients: in no log, no metric and no other client's answer."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import httpx
import pytest

from ops.commands.up import DEMO_MODEL
from tests.support.gateway_process import GatewayProcess, body, tenant, write_config
from tests.support.local_stack import Stack
from tests.support.raw_http import HOST, answers, connect, post, receive_all
from tests.support.refused_start import refusals

KEYS = {
    name: f"sk-{name}-UNIQUE-long-enough-{name[::-1]}"
    for name in ("tenant", "other", "admin", "wrong", "header", "trailer", "metadata", "redis")
}
"""Secrets that must not appear in any output of the process."""
TEXTS = {
    name: f"{name} words UNIQUE {name[::-1]}"
    for name in ("prompt", "message", "system", "stop", "tool", "schema", "user", "unread", "query")
}
"""Prompt texts, which may return to their own client only, and must not appear in logs."""


def _requests(client: httpx.Client, other: httpx.Client, admin: httpx.Client) -> str:
    """Send valid and invalid requests to all routes. Return their answers with headers."""
    chat = {
        "model": "demo",
        "messages": [
            {"role": "system", "content": TEXTS["system"]},
            {"role": "user", "content": TEXTS["message"]},
        ],
        "max_tokens": 4,
        "stop": TEXTS["stop"],
        "user": TEXTS["user"],
    }
    function = {"name": "f", "description": TEXTS["tool"], "parameters": {"type": "object"}}
    schema = {"type": "object", "title": TEXTS["schema"]}
    chats = [
        chat,
        chat | {"stream": True},
        chat | {"tools": [{"type": "function", "function": function}]},
        chat | {"structured_outputs": {"json": schema}},
        chat | {"structured_outputs": {"regex": "(" + TEXTS["schema"]}},
        chat | {"temperature": TEXTS["prompt"]},
        chat | {TEXTS["prompt"]: 1},
        chat | {"chat_template_kwargs": {"messages": TEXTS["prompt"]}},
        chat | {"model": TEXTS["prompt"]},
        chat | {"model": "other/secret"},
        chat | {"messages": TEXTS["message"]},
    ]
    texts = [
        body(prompt=TEXTS["prompt"]),
        body(prompt=TEXTS["prompt"] * 2000),
        body(prompt=TEXTS["prompt"], stream=True, max_tokens=4),
        body(prompt=TEXTS["prompt"], echo=True),
    ]
    found = []
    for path, bodies in (("/v1/chat/completions", chats), ("/v1/completions", texts)):
        found += [client.post(path, json=wanted) for wanted in bodies]
        found += [other.post(path, json=bodies[0])]
        found += [client.post(path, content=TEXTS["unread"])]
        found += [client.post(path, content=json.dumps(bodies[0])[:-5])]
        for scheme in ("Bearer ", "Basic ", "", "bearer  "):
            headers = {"authorization": scheme + KEYS["wrong"]}
            found += [client.post(path, json=bodies[0], headers=headers)]
    secret = {"x-api-key": KEYS["header"], "cookie": KEYS["header"], "x-request-id": "not sane!"}
    for path in ("/v1/models", "/nowhere", f"/v1/models/{TEXTS['query']}", "/metrics"):
        found += [client.get(path, headers=secret, params={"api_key": TEXTS["query"]})]
    form = {"name": TEXTS["query"], "base": "demo"}
    files = [("file", ("adapter_config.json", TEXTS["unread"].encode()))]
    found += [admin.post("/v1/adapters", data=form, files=files)]
    found += [admin.post("/v1/load_lora_adapter", json={"lora_name": "x", "lora_path": "/root"})]
    found += [client.post("/v1/adapters", data=form, files=files)]
    return "\n".join(f"{answer.headers}\n{answer.text}" for answer in found)


def _raw(url: str) -> str:
    """Send truncated and malformed requests, and return the answers."""
    key = b"authorization: Bearer " + KEYS["tenant"].encode()
    said = TEXTS["unread"].encode()
    found = b""
    for request in (
        post("/v1/completions", said, key)[:-5],
        post("/v1/completions", said, key, key),
        b"GET / HTTP/1.1\r\n" + key + b"\r\n" + said + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + HOST + key + b"\nx: " + said + b"\r\n\r\n",
        KEYS["tenant"].encode() + b"\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\n" + HOST + b"transfer-encoding: chunked\r\n\r\n"
        b"0\r\nauthorization: Bearer " + KEYS["trailer"].encode() + b"\r\n\r\n",
    ):
        with connect(url) as connection:
            connection.sendall(request)
            connection.shutdown(1)
            found += receive_all(connection)
    assert [answer.status for answer in answers(found)].count(400) >= 4
    return found.decode()


@pytest.mark.parametrize("level", ["info", "debug"])
def test_a_whole_run_leaves_no_secret_behind(stack: Stack, tmp_path: Path, level: str) -> None:
    config = write_config(
        tmp_path / "c.yaml",
        tenant("tenant", KEYS["tenant"], requests_per_minute=1000),
        tenant("other", KEYS["other"], requests_per_minute=1),
    )
    settings = {
        "config": config,
        "admin_key": KEYS["admin"],
        "admin_port": 0,
        "usage_log": tmp_path / "usage.jsonl",
        "redis_url": f"redis://user:{KEYS['redis']}@127.0.0.1:1/0",
        "triton_metadata": json.dumps({"x-secret": KEYS["metadata"]}),
        "log_level": level,
        "header_timeout": 2,
        "body_timeout": 2,
        "adapter_root": tmp_path / "none",
    }
    with GatewayProcess(tmp_path / "gateway", stack, **settings) as gateway:
        with (
            gateway.client(KEYS["tenant"]) as client,
            gateway.client(KEYS["other"]) as other,
            gateway.client(KEYS["admin"]) as admin,
        ):
            admin.base_url = httpx.URL(f"http://127.0.0.1:{gateway.admin_port}")
            told = _requests(client, other, admin) + _raw(gateway.url)
            metrics = admin.get("/metrics").text
            # The configuration that is read again has a key instead of its hash.
            write_config(config, {"name": "tenant", "keys": [KEYS["wrong"]], "models": []})
            gateway.process.send_signal(signal.SIGHUP)
            gateway.wait_for("refused")
    files = [path for path in tmp_path.rglob("*") if path.is_file() and path != config]
    assert {"gateway.log", "usage.jsonl"} <= {path.name for path in files}
    kept = metrics + "".join(path.read_text(errors="replace") for path in files)
    assert '"tenant":"tenant"' in kept
    assert 'tenant="tenant"' in kept
    assert "POST /v1/chat/completions 200" in kept
    for name, secret in (KEYS | TEXTS).items():
        assert secret not in kept, name
    for name, key in KEYS.items():
        assert key not in told, name


def test_a_wrong_setting_is_told_without_its_value(tmp_path: Path) -> None:
    text = "admin_keys: [SECRET]\ntenants: [{name: a, keys: [SECRET, 7], models: []}]\n"
    config = tmp_path / "c.yaml"
    config.write_text(text)
    wrong: list[tuple[str, dict[str, object]]] = [
        ("admin_key", {"admin_key": "SECRET"}),
        ("redis_url", {"redis_url": "redis://user:SECRET/more@host:6379/0"}),
        ("redis_url", {"redis_url": "redis://user:SECRET#more@host:6379/0"}),
        ("triton_metadata", {"triton_metadata": '{"a": "SECRET"'}),
        ("triton_metadata", {"triton_metadata": '["SECRET"]'}),
        ("c.yaml", {"config": config}),
    ]
    told = refusals(*[settings | {"tokenizer_dir": DEMO_MODEL} for _, settings in wrong])
    for (name, _), said in zip(wrong, told, strict=True):
        assert name in said.lower()
        assert "SECRET" not in said

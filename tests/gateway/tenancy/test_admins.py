"""Admin keys: their minimum length, the limit on wrong guesses, and the audit log of actions."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.config.tenants import key_hash, new_key
from gateway.tenancy.wrong_keys import MAX_ADDRESSES, WrongKeys
from ops.commands.up import DEMO_ADAPTERS, DEMO_MODEL
from tests.support.gateway_process import GatewayProcess, body, tenant, write_config
from tests.support.local_stack import Stack
from tests.support.refused_start import refusals

KEY, FIRST, SECOND = "sk-the-key-of-acme", new_key(), new_key()
GUESSES, TOLD_PLAINLY = 300, 20
AUDITED = {"admin", "action", "target", "outcome", "before", "after"}


@pytest.fixture
def gateway(stack: Stack, tmp_path: Path) -> Iterator[GatewayProcess]:
    """Start a gateway with two admin keys, one from the file and one from the settings."""
    config = write_config(tmp_path / "c.yaml", tenant("acme", KEY), admin_keys=[key_hash(SECOND)])
    settings = {
        "config": config,
        "admin_key": FIRST,
        "adapter_root": DEMO_ADAPTERS,
        "log_format": "json",
        "log_level": "error",
    }
    with GatewayProcess(tmp_path / "g", stack, **settings) as gateway:
        yield gateway


def test_a_short_key_is_refused_in_words() -> None:
    keys = ["x" * 8, "x" * 31]
    told = refusals(*[{"tokenizer_dir": DEMO_MODEL, "admin_key": key} for key in keys])
    for key, said in zip(keys, told, strict=True):
        found = f"GATEWAY_ADMIN_KEY: has {len(key)} characters; it must have at least 32"
        assert found in said
        assert key not in said


def test_guessing_is_noticed_and_locks_nobody_out(gateway: GatewayProcess) -> None:
    def guess(number: int) -> int:
        # A client that sends a different X-Forwarded-For each time is counted by its real address.
        said = {"authorization": f"Bearer guess-{number}", "x-forwarded-for": f"10.0.0.{number}"}
        return client.get("/v1/adapters", headers=said).status_code

    with gateway.client() as client, ThreadPoolExecutor(8) as threads:
        found = list(threads.map(guess, range(GUESSES)))
        assert found.count(401) == TOLD_PLAINLY
        assert found.count(429) == GUESSES - TOLD_PLAINLY
        refused = client.get("/v1/adapters", headers={"authorization": "Bearer one-more"})
        assert refused.json()["error"]["code"] == "too_many_wrong_keys"
        assert refused.headers["x-should-retry"] == "false"
        # Admins, a tenant, clients without a key and probes are served at the guesser's address.
        for key in (FIRST, SECOND):
            right = {"authorization": f"Bearer {key}"}
            assert client.get("/v1/adapters", headers=right).status_code == 200
            assert client.get("/metrics", headers=right).status_code == 200
        acme = {"authorization": f"Bearer {KEY}"}
        assert client.post("/v1/completions", json=body(), headers=acme).status_code == 200
        without = client.get("/v1/adapters")
        assert without.status_code == 401
        assert "You didn't provide an admin key" in without.json()["error"]["message"]
        assert client.get("/health/live").status_code == 200
        assert client.get("/health/ready").status_code == 200


def test_wrong_keys_are_counted_by_address_for_a_minute() -> None:
    now = 0.0
    wrong = WrongKeys(lambda: now)
    assert [wrong.count("10.0.0.1") for _ in range(3)] == [1, 2, 3]
    assert wrong.count("10.0.0.2") == 1
    assert wrong.count("::ffff:10.0.0.1") == 4
    assert [wrong.count(f"2001:db8::{last}") for last in (1, 2)] == [1, 2]
    assert wrong.count("2001:db8:0:1::1") == 1
    assert [wrong.count(odd) for odd in (None, "", "x" * 10**6)] == [1, 2, 3]
    now = 59.0
    assert wrong.count("10.0.0.1") == 5
    now = 60.0
    assert wrong.count("10.0.0.1") == 1


def test_wrong_keys_take_bounded_memory() -> None:
    wrong = WrongKeys()
    for number in range(3 * MAX_ADDRESSES):
        assert wrong.count("192.0.2.1") == number + 1  # counted all the time, so never forgotten
        wrong.count(f"10.0.{number // 256}.{number % 256}")
    assert len(wrong) == MAX_ADDRESSES


def test_either_header_may_hold_an_admins_key(gateway: GatewayProcess) -> None:
    other = "sk-of-another-server"
    with gateway.client(other) as client:
        assert client.get("/v1/adapters", headers={"x-api-key": FIRST}).status_code == 200
    with gateway.client(SECOND) as client:
        assert client.get("/v1/adapters", headers={"x-api-key": other}).status_code == 200


def test_two_wrong_keys_in_a_request_are_one_guess(gateway: GatewayProcess) -> None:
    with gateway.client("one-wrong-key") as client:
        headers = {"x-api-key": "another-wrong-key"}
        found = [
            client.get("/v1/adapters", headers=headers).status_code for _ in range(TOLD_PLAINLY + 1)
        ]
    assert found == [401] * TOLD_PLAINLY + [429]


def _call(gateway: GatewayProcess, key: str, method: str, path: str, **sent: Any) -> httpx.Response:
    with gateway.client(key) as client:
        return client.request(method, path, **sent)


def _upload(folder: Path, name: str) -> dict[str, Any]:
    files = [("file", (path.name, path.read_bytes())) for path in sorted(folder.iterdir())]
    return {"data": {"name": name, "base": "demo"}, "files": files}


def test_every_action_has_its_line(gateway: GatewayProcess) -> None:
    """Each admin action is logged even at log level error, and even if the action failed."""
    named = {"lora_name": "tokyo", "lora_path": "ja"}
    zh, ja = DEMO_ADAPTERS / "zh", DEMO_ADAPTERS / "ja"
    first = _call(gateway, FIRST, "POST", "/v1/adapters", **_upload(zh, "mine")).json()["served"]
    second = _call(gateway, SECOND, "POST", "/v1/adapters", **_upload(ja, "mine")).json()["served"]
    for key, method, path, sent, status in (
        (FIRST, "POST", "/v1/adapters/mine/rollback", {}, 200),
        (FIRST, "POST", "/v1/adapters/mine/verify", None, 200),
        (SECOND, "DELETE", "/v1/adapters/mine", None, 200),
        (FIRST, "POST", "/v1/load_lora_adapter", named, 200),
        (FIRST, "POST", "/v1/load_lora_adapter", named, 400),
        (FIRST, "POST", "/v1/unload_lora_adapter", {"lora_name": "tokyo"}, 200),
        (FIRST, "POST", "/v1/unload_lora_adapter", {"lora_name": "acme/nothing"}, 404),
        (FIRST, "DELETE", "/v1/adapters/no%09such", None, 404),
        (FIRST, "GET", "/v1/adapters", None, 200),
        (KEY, "DELETE", "/v1/adapters/mine", None, 401),
    ):
        answer = _call(gateway, key, method, path, **({} if sent is None else {"json": sent}))
        assert answer.status_code == status, (path, answer.text)
    lines = [json.loads(line) for line in gateway.text.splitlines() if "gateway.audit" in line]
    assert all(set(line) > AUDITED for line in lines)
    one, two = {"served": first}, {"served": second}
    found = [
        (line["admin"], line["action"], line["target"], line["outcome"], *_served(line))
        for line in lines
    ]
    a, b = key_hash(FIRST)[:15], key_hash(SECOND)[:15]
    tokyo = {"served": second}
    assert found == [
        (a, "adapters.add", "mine", "done", None, one),
        (b, "adapters.add", "mine", "done", one, two),
        (a, "adapters.rollback", "mine", "done", two, one),
        (a, "adapters.verify", "mine", "done", one, one),
        (b, "adapters.remove", "mine", "done", one, None),
        (a, "adapters.load", "tokyo", "done", None, tokyo),
        (a, "adapters.load", "tokyo", "InvalidRequest", tokyo, tokyo),
        (a, "adapters.unload", "tokyo", "done", tokyo, None),
        (a, "adapters.unload", "acme/nothing", "UnknownAdapter", None, None),
        (a, "adapters.remove", "(not a name)", "UnknownAdapter", None, None),
    ]
    for key in (FIRST, SECOND, KEY):
        assert key not in gateway.text
        assert key_hash(key) not in gateway.text


def _served(line: dict[str, Any]) -> list[dict[str, Any] | None]:
    states = [line["before"], line["after"]]
    return [None if state is None else {"served": state["served"]} for state in states]

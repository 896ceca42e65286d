"""Reported problems that still exist: `/health/ready` for admins, and the operators' page.

The gateway has no tenants unless a test adds some.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, Locator, expect

from tests.support.gateway_process import GatewayProcess, body, tenant, write_config
from tests.support.local_stack import Stack
from tests.support.operated_gateway import ADMIN, DEMO_ADAPTERS
from tests.support.operators_page import OperatorsPage, operating
from tests.support.redis_server import running_redis

_WITHIN_S = 300.0
NOT_YAML = "tenants: [\n"


def _config(folder: Path, **sections: Any) -> Path:
    path = folder / "c.yaml"
    path.write_text(json.dumps({"anonymous": True, **sections}), encoding="utf-8")
    return path


@contextmanager
def _running(folder: Path, stack: Stack, config: Path, **settings: Any) -> Iterator[GatewayProcess]:
    own = {"config": config, "admin_key": ADMIN, "allow_anonymous": True}
    with GatewayProcess(folder / "g", stack, **own | settings) as gateway:
        yield gateway


def _ready(gateway: GatewayProcess) -> dict[str, Any]:
    with gateway.client(ADMIN) as client:
        answer = client.get("/health/ready")
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def _troubles(gateway: GatewayProcess) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = _ready(gateway).get("troubles", [])
    return found


def _until(gateway: GatewayProcess, met: Callable[[list[dict[str, Any]]], object]) -> None:
    deadline = time.monotonic() + _WITHIN_S
    while not met(found := _troubles(gateway)):
        assert time.monotonic() < deadline, found
        time.sleep(0.05)


def _listed(page: OperatorsPage) -> Locator:
    return page.page.get_by_role("list", name="What needs you").get_by_role("listitem")


def _is_over(page: OperatorsPage, gateway: GatewayProcess) -> None:
    _until(gateway, lambda found: not found)
    expect(page.page.get_by_text("Nothing needs you.")).to_be_visible()


def test_a_configuration_that_was_refused(browser: Browser, stack: Stack, tmp_path: Path) -> None:
    config = _config(tmp_path)
    with (
        _running(tmp_path, stack, config) as gateway,
        operating(browser, gateway.url, ADMIN) as page,
    ):
        assert _troubles(gateway) == []
        expect(page.page.get_by_text("Nothing needs you.")).to_be_visible()
        config.write_text(NOT_YAML, encoding="utf-8")
        _until(gateway, bool)
        (trouble,) = _troubles(gateway)
        assert trouble["level"] == "error"
        assert "the configuration was refused, the old one stays in force" in trouble["text"]
        assert f"{config}:2: not YAML" in trouble["text"]
        expect(_listed(page)).to_have_count(1)
        expect(_listed(page)).to_contain_text("Error: the configuration was refused")
        with gateway.client() as client:  # without keys, every client sees the problems
            assert client.get("/health/ready").json()["troubles"]
        _config(tmp_path)
        _is_over(page, gateway)


def test_only_admins_see_troubles_where_there_are_keys(stack: Stack, tmp_path: Path) -> None:
    config = write_config(tmp_path / "c.yaml", tenant("acme", "sk-acme"))
    with _running(tmp_path, stack, config, allow_anonymous=False) as gateway:
        config.write_text(NOT_YAML, encoding="utf-8")
        _until(gateway, bool)
        for key in (None, "sk-acme"):
            with gateway.client(key) as client:
                assert client.get("/health/ready").json() == {"status": "ready"}
        # A tenant's invalid request concerns only that tenant, so it is no problem of the gateway.
        with gateway.client("sk-acme") as client:
            asked = client.post("/v1/completions", json=body(model="other/secret"))
        assert asked.status_code == 404
        assert "secret" not in str(_ready(gateway))


def test_a_declared_adapter_that_failed(browser: Browser, stack: Stack, tmp_path: Path) -> None:
    source = tmp_path / "zh-of-us"
    shutil.copytree(DEMO_ADAPTERS / "zh", source)
    weights = source / "adapter_model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(b"{}")
    adapters = [{"name": name, "source": str(source)} for name in ("bad", "worse")]
    config = _config(tmp_path, adapters=adapters)
    with (
        _running(tmp_path, stack, config) as gateway,
        operating(browser, gateway.url, ADMIN) as page,
    ):
        _until(gateway, lambda found: len(found) == 2)
        for name, trouble in zip(("bad", "worse"), _troubles(gateway), strict=True):
            assert trouble["level"] == "error"
            assert trouble["text"].startswith(f"declared adapter '{name}': {source}")
        expect(_listed(page)).to_have_count(2)
        expect(_listed(page).first).to_contain_text("Error: declared adapter 'bad'")
        _listed(page).first.get_by_role("link").click()
        expect(page.page.locator("#adapters h2")).to_be_visible()
        # One adapter leaves the configuration, and the other one's file is repaired.
        weights.write_bytes(whole)
        _config(tmp_path, adapters=adapters[:1])
        _until(gateway, lambda found: not found)
        page.view("Overview")
        _is_over(page, gateway)


def test_requests_for_unknown_models(browser: Browser, stack: Stack, tmp_path: Path) -> None:
    with (
        _running(tmp_path, stack, _config(tmp_path)) as gateway,
        operating(browser, gateway.url, ADMIN) as page,
        gateway.client() as client,
    ):
        for path, fields in (
            ("/v1/completions", body(model="nonesuch")),
            ("/v1/embeddings", {"model": "nonesuch", "input": "Hi"}),
            ("/v1/completions", body(model="evil\nmodel\x1b[31m<b>")),
        ):
            assert client.post(path, json=fields).status_code == 404, path
        _until(gateway, lambda found: found and found[0]["times"] == 3)
        (trouble,) = _troubles(gateway)
        assert trouble["level"] == "warning"
        assert trouble["last"] == r"'evil\nmodel\x1b[31m<b>'"
        expect(_listed(page)).to_have_count(1)
        told = r"Warning: requests name models that are not served"
        expect(_listed(page)).to_contain_text(told)
        expect(_listed(page)).to_contain_text(r"(3 times, the last: 'evil\nmodel\x1b[31m<b>')")
        assert gateway.text.count("requests name models that are not served") == 1
        assert "\x1b" not in gateway.text


def test_redis_that_is_away_and_back(browser: Browser, stack: Stack, tmp_path: Path) -> None:
    config = write_config(tmp_path / "c.yaml", tenant("acme", "sk-acme", requests_per_minute=100))
    with running_redis() as redis:
        own = {"redis_url": redis.url, "allow_anonymous": False}
        with (
            _running(tmp_path, stack, config, **own) as gateway,
            operating(browser, gateway.url, ADMIN) as page,
        ):
            _until(gateway, lambda found: not found)
            redis.kill()
            with gateway.client("sk-acme") as client:
                assert client.post("/v1/completions", json=body()).status_code == 200
            told = (
                "Redis cannot be used: ",
                "limits are not shared",
                "conversations are not shared now",
            )
            _until(gateway, lambda found: all(any(t in f["text"] for f in found) for t in told))
            for text in told:
                expect(_listed(page).filter(has_text=text)).to_have_count(1)
            redis.start()
            _is_over(page, gateway)


def test_what_each_worker_has_is_joined(stack: Stack, tmp_path: Path) -> None:
    config = write_config(tmp_path / "c.yaml", tenant("acme", "sk-acme"))
    adapters = [{"name": "bad", "source": str(tmp_path / "nothing")}]
    with running_redis() as redis:
        own = {"redis_url": redis.url, "workers": 2, "allow_anonymous": False}
        with _running(tmp_path, stack, config, **own) as gateway, gateway.client(ADMIN) as client:

            def held() -> dict[str, Any]:
                state = client.get("/v1/admin/state").json()
                troubles: dict[str, Any] = state["troubles"]
                return troubles if state["gateway"]["answering"] == 2 else {"of one worker": 1}

            def until(names: set[str]) -> None:
                deadline = time.monotonic() + _WITHIN_S
                while set(found := held()) != names:
                    assert time.monotonic() < deadline, found
                    time.sleep(0.1)

            until(set())
            write_config(config, tenant("acme", "sk-acme"), adapters=adapters)
            until({"declared_adapters bad"})
            config.write_text(NOT_YAML, encoding="utf-8")
            until({"declared_adapters bad", "configuration"})
            write_config(config, tenant("acme", "sk-acme"))
            until(set())

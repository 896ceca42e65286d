"""Adapters that the configuration file declares: loading, changes, rollback and removal."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from adapters import npy
from gateway.config.file import ConfigurationError, load
from gateway.config.tenants import key_hash, new_key
from tests.support.adapter_store import becomes
from tests.support.authority import Authority
from tests.support.disk_engine import DiskEngine, save_model
from tests.support.fake_triton import serving
from tests.support.file_servers import FileServer
from tests.support.gateway_process import write_config
from tests.support.in_process import metric_of, running
from tests.support.lora_files import linear_content, qv_tensors, write_peft
from tests.support.redis_server import RedisServer

ADMIN = new_key()
AUTHORIZED = {"authorization": f"Bearer {ADMIN}"}


def _adapter(folder: Path, seed: int) -> Path:
    return write_peft(folder, qv_tensors(seed=seed))


def _declare(path: Path, **sections: Any) -> Path:
    return write_config(path, **{"admin_keys": [key_hash(ADMIN)], **sections})


@contextlib.asynccontextmanager
async def _gateway(
    folder: Path, config: Path, **settings: Any
) -> AsyncIterator[tuple[httpx.AsyncClient, Any]]:
    folder.mkdir(exist_ok=True)
    fields = {"model_name": "demo", "config": config, **settings}
    async with serving(DiskEngine(folder)) as endpoint:
        async with running(save_model(folder), endpoint, **fields) as (client, service, _):
            await asyncio.wait_for(service.started.wait(), 60)
            yield client, service


def _versions(service: Any) -> dict[str, int]:
    """Return the number of versions of each adapter, by name."""
    return {record.name: len(record.versions) for record in service.adapters.records}


def _served(service: Any, name: str) -> str:
    digest: str = service.adapters.record(name).served
    return digest


async def _standing(client: httpx.AsyncClient) -> dict[str, tuple[str, str | None]]:
    answer = (await client.get("/v1/adapters", headers=AUTHORIZED)).json()
    return {each["name"]: (each["state"], each["error"]) for each in answer["declared"]}


async def test_one_that_fails_stops_no_other_and_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    authority = Authority(tmp_path, "files")
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.file))
    good, late = _adapter(tmp_path / "good", 1), _adapter(tmp_path / "late", 2)
    with FileServer(authority.issue("server")) as server:
        url = f"https://me:hunter2@127.0.0.1:{server.port}/late"
        adapters = [
            {"name": "late", "source": url},
            {"name": "never", "source": "/nowhere"},
            {"name": "good", "source": str(good)},
        ]
        config = _declare(tmp_path / "gateway.yaml", adapters=adapters)
        async with _gateway(tmp_path / "a", config) as (client, service):
            await becomes(lambda: _versions(service) == {"good": 1})
            await becomes(
                lambda: metric_of(service, "gateway_declared_adapters", state="failed") == 2
            )
            async with asyncio.timeout(300):
                while (await _standing(client)).get("late", ("",))[0] != "failed":
                    await asyncio.sleep(0.05)
            standing = await _standing(client)
            assert standing["good"] == ("loaded", None)
            assert "adapter_config.json" in (standing["late"][1] or "")
            server.put("/late", late)
            await becomes(lambda: _versions(service) == {"good": 1, "late": 1})
            [version] = service.adapters.record("late").versions
            assert version.added_by == "configuration"
            assert version.source == url.replace("me:hunter2@", "")
            answer = await client.get("/v1/adapters", headers=AUTHORIZED)
            assert "hunter2" not in answer.text + caplog.text
            # A reload finds no change and loads nothing: a load would come before the next HEAD.
            server.asked.clear()
            for looks in (1, 2):
                service.configuration.reload_now()
                last = ("HEAD", "/late/chat_template.jinja")
                await becomes(lambda n=looks, last=last: server.asked.count(last) >= n)
            assert {method for method, _ in server.asked} == {"HEAD"}
            # Changed files are loaded.
            server.put("/late", _adapter(tmp_path / "other", 3))
            service.configuration.reload_now()
            await becomes(lambda: _versions(service) == {"good": 1, "late": 2})


async def test_a_watched_folder_is_followed_and_a_rollback_holds(tmp_path: Path) -> None:
    folder = tmp_path / "adapters"
    _adapter(folder / "zh", 1)
    config = _declare(tmp_path / "gateway.yaml", adapters_folder=str(folder))
    async with _gateway(tmp_path / "a", config) as (client, service):
        await becomes(lambda: _versions(service) == {"zh": 1})
        first = _served(service, "zh")
        _adapter(folder / "ja", 2)
        (folder / "not a name").mkdir()
        await becomes(lambda: _versions(service) == {"ja": 1, "zh": 1})
        _adapter(folder / "zh", 3)
        await becomes(lambda: _versions(service) == {"ja": 1, "zh": 2})
        second = _served(service, "zh")
        await client.post("/v1/adapters/zh/rollback", json={}, headers=AUTHORIZED)
        # A reload and a restart check all adapters again. No file has changed.
        _declare(config, adapters_folder=str(folder), limits={})
        os.kill(os.getpid(), signal.SIGHUP)
        await becomes(
            lambda: metric_of(service, "gateway_configuration_reloads_total", outcome="applied")
        )
        shutil.rmtree(folder / "ja")
        _adapter(folder / "ko", 4)
        await becomes(lambda: "ko" in _versions(service))
        assert _served(service, "zh") == first
    async with _gateway(tmp_path / "a", config) as (client, service):
        _adapter(folder / "vi", 5)
        await becomes(lambda: "vi" in _versions(service))
        await becomes(lambda: metric_of(service, "gateway_declared_adapters", state="loaded") == 3)
        assert _served(service, "zh") == first
        # Without `prune_adapters`, an adapter stays although its folder was deleted.
        assert _versions(service) == {"ja": 1, "ko": 1, "vi": 1, "zh": 2}
        # A return to earlier content counts as a change, too.
        _adapter(folder / "zh", 1)
        _adapter(folder / "vi", 6)
        await becomes(lambda: _versions(service)["vi"] == 2)
        _adapter(folder / "zh", 3)
        await becomes(lambda: _served(service, "zh") == second)
        assert _versions(service)["zh"] == 2


async def test_what_changed_while_no_gateway_ran_is_served(tmp_path: Path) -> None:
    zh = _adapter(tmp_path / "zh", 1)
    declared = [{"name": "zh", "source": str(zh), "watch": True}]
    config = _declare(tmp_path / "gateway.yaml", adapters=declared)
    async with _gateway(tmp_path / "a", config) as (_, service):
        await becomes(lambda: _versions(service) == {"zh": 1})
        first = _served(service, "zh")
        _adapter(zh, 2)
        await becomes(lambda: _versions(service) == {"zh": 2})
    _adapter(zh, 1)
    async with _gateway(tmp_path / "a", config) as (_, service):
        await becomes(lambda: metric_of(service, "gateway_declared_adapters", state="loaded") == 1)
        assert _served(service, "zh") == first


async def test_a_rollback_holds_whichever_gateway_looks_again(
    tmp_path: Path, redis_server: RedisServer
) -> None:
    zh, configs = _adapter(tmp_path / "zh", 1), (tmp_path / "a.yaml", tmp_path / "b.yaml")
    declared = [{"name": "zh", "source": str(zh)}]
    for config in configs:
        _declare(config, adapters=declared)
    async with (
        _gateway(tmp_path / "a", configs[0], redis_url=redis_server.url) as (client, one),
        _gateway(tmp_path / "b", configs[1], redis_url=redis_server.url) as (_, other),
    ):
        for each in (one, other):
            await becomes(
                lambda each=each: metric_of(each, "gateway_declared_adapters", state="loaded") == 1
            )
        first = _served(one, "zh")
        _adapter(zh, 2)
        _declare(configs[0], adapters=declared, limits={})
        await becomes(lambda: _versions(one) == {"zh": 2})
        await client.post("/v1/adapters/zh/rollback", json={}, headers=AUTHORIZED)
        await becomes(lambda: _served(other, "zh") == first)
        # The other gateway checks its declarations again. The added one shows when it has.
        last = {"name": "zzz", "source": str(_adapter(tmp_path / "zzz", 3))}
        _declare(configs[1], adapters=[*declared, last])
        await becomes(lambda: metric_of(other, "gateway_declared_adapters", state="loaded") == 2)
        assert other.adapters.record("zh").revision == 3
        assert _served(other, "zh") == first


async def test_what_came_by_a_declaration_alone_goes_with_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "adapters"
    for number, name in enumerate(("a", "b", "mixed")):
        _adapter(folder / name, number)
    config = _declare(tmp_path / "gateway.yaml", adapters_folder=str(folder), prune_adapters=True)
    async with _gateway(tmp_path / "g", config) as (_, service):
        await becomes(lambda: len(_versions(service)) == 3)
        by_hand = {"source": "test", "within": None, "added_by": "sha256:01234567"}
        for name in ("mine", "mixed"):
            other = _adapter(tmp_path / name, 9)
            await service.adapter_admin.add(name, "demo", other, **by_hand)
        shutil.rmtree(folder / "a")
        shutil.rmtree(folder / "mixed")
        await becomes(lambda: "a" not in _versions(service))
        assert _versions(service) == {"b": 1, "mine": 1, "mixed": 2}
        # A folder without adapters may be an unmounted volume, so nothing is removed.
        (folder / "lost+found").mkdir()
        (folder / "b").rename(tmp_path / "b")
        _declare(config, adapters_folder=str(folder), prune_adapters=True, limits={})
        await becomes(lambda: f"{folder} has no folder" in caplog.text)
        assert "b" in _versions(service)
        (tmp_path / "b").rename(folder / "c")
        await becomes(lambda: _versions(service) == {"c": 1, "mine": 1, "mixed": 2})


async def test_a_folder_that_is_being_replaced_is_not_pruned(tmp_path: Path) -> None:
    """A replacement takes two renames. Between them, the adapter has no folder for a moment."""
    folder, new = tmp_path / "adapters", _adapter(tmp_path / "new", 2)
    _adapter(folder / "zh", 1)
    config = _declare(tmp_path / "gateway.yaml", adapters_folder=str(folder), prune_adapters=True)
    async with _gateway(tmp_path / "g", config) as (_, service):
        await becomes(lambda: _versions(service) == {"zh": 1})
        (folder / "zh").rename(tmp_path / "old")
        # Once the report has ja, the gateway has read the folder between the two renames of zh.
        _adapter(folder / "ja", 3)
        await becomes(lambda: "ja" in {each.name for each in service.declared.read_report()})
        new.rename(folder / "zh")
        await becomes(lambda: _versions(service) == {"ja": 1, "zh": 2})
        assert service.adapters.record("zh").life == 1


async def test_a_change_of_npy_files_is_seen(tmp_path: Path) -> None:
    declared = [
        {"name": "followed", "source": str(tmp_path / "followed"), "watch": True},
        {"name": "told", "source": str(tmp_path / "told")},
    ]

    def write(name: str, number: int) -> None:
        (tmp_path / name).mkdir(exist_ok=True)
        npy.write(linear_content(number), tmp_path / name)

    write("followed", 1)
    write("told", 1)
    config = _declare(tmp_path / "gateway.yaml", adapters=declared)
    async with _gateway(tmp_path / "a", config) as (_, service):
        await becomes(lambda: _versions(service) == {"followed": 1, "told": 1})
        write("told", 2)
        write("followed", 2)
        await becomes(lambda: _versions(service) == {"followed": 2, "told": 1})
        service.configuration.reload_now()
        await becomes(lambda: _versions(service) == {"followed": 2, "told": 2})


async def test_gateways_on_one_redis_add_it_once(tmp_path: Path, redis_server: RedisServer) -> None:
    folder = tmp_path / "adapters"
    _adapter(folder / "zh", 1)
    config = _declare(tmp_path / "gateway.yaml", adapters_folder=str(folder), prune_adapters=True)
    shared = {"redis_url": redis_server.url}
    async with (
        _gateway(tmp_path / "a", config, **shared) as (_, one),
        _gateway(tmp_path / "b", config, **shared) as (_, other),
    ):
        for number in (1, 2, 3):
            _adapter(folder / "zh", number)
            for each in (one, other):
                await becomes(lambda each=each, n=number: _versions(each) == {"zh": n})
        await becomes(lambda: _served(one, "zh") == _served(other, "zh"))
        # Three changes make three revisions: no gateway undid a change of the other.
        assert one.adapters.record("zh").revision == 3
        shutil.rmtree(folder / "zh")
        _adapter(folder / "ja", 4)
        for each in (one, other):
            await becomes(lambda each=each: _versions(each) == {"ja": 1})


async def test_of_two_on_one_store_one_works_and_both_tell(tmp_path: Path) -> None:
    _adapter(tmp_path / "adapters" / "zh", 1)
    config = _declare(tmp_path / "gateway.yaml", adapters_folder=str(tmp_path / "adapters"))
    async with _gateway(tmp_path / "a", config) as (_, one):
        await becomes(lambda: metric_of(one, "gateway_declared_adapters", state="loaded") == 1)
        async with _gateway(tmp_path / "a", config) as (client, other):
            async with asyncio.timeout(300):
                while (await _standing(client)).get("zh") != ("loaded", None):
                    await asyncio.sleep(0.05)
            assert metric_of(other, "gateway_declared_adapters", state="loaded") == 0


WRONG = {
    "adapters: [{name: ../x, source: /a}]": "must be NAME or TENANT/NAME",
    "adapters: [{name: a, source: 'https://me:hunter2@h/../x'}]": "must be an absolute folder",
    "adapters: [{name: a, source: 's3://bucket/c', watch: true}]": "can be watched",
    "adapters: [{name: a, source: /a}, {name: a, source: /b}]": "used twice",
    "adapters: [{name: a, source: /a, base: b}]": "unknown; allowed: name, source, watch",
    "adapters_folder: here": "must be an absolute folder",
    "prune_adapters: 1": "must be true or false",
}


@pytest.mark.parametrize("text", WRONG)
def test_mistakes_have_their_line_and_tell_no_secret(tmp_path: Path, text: str) -> None:
    path = tmp_path / "gateway.yaml"
    path.write_text(f"tenants: []\n{text}\n", encoding="utf-8")
    with pytest.raises(ConfigurationError) as found:
        load(path)
    assert WRONG[text] in str(found.value)
    assert f"{path}:2:" in str(found.value)
    assert "hunter2" not in str(found.value)

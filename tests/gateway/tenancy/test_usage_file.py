"""The file of the usage log: deleted, renamed, shared by processes, and on a full disk."""

from __future__ import annotations

import asyncio
import json
import logging
import multiprocessing
import random
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.tenancy.usage_log import UsageLog, UsageRecord
from tests.support.fake_triton import FakeTriton, serving
from tests.support.full_disk import full_disk
from tests.support.in_process import ids_of, metric_of, running, save_tokenizer

LOST = "gateway_usage_records_lost_total"
_CUT = 500


def _usage(number: int, writer: str = "a") -> UsageRecord:
    return UsageRecord(
        id=f"{writer}{number}",
        request_id="r",
        tenant="t",
        model="m",
        adapter=None,
        adapter_version=None,
        prompt_tokens=1,
        cached_tokens=0,
        completion_tokens=2,
        status=200,
        finish=("stop",),
        started=1.0,
        ended=2.0,
    )


def _ids(path: Path) -> list[str]:
    """Return the ids of all records. Assert that every line is complete."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["id"] for line in lines if line.strip()]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "!"}')
    return tmp_path


async def _ask(client: httpx.AsyncClient) -> str:
    """Send a request, and return the id of the usage record that it must have."""
    answer = await client.post("/v1/completions", json={"model": "m", "prompt": "xyz"})
    assert answer.status_code == 200
    return str(answer.json()["id"]).removeprefix("cmpl-")


async def _ask_until(client: httpx.AsyncClient, done: Callable[[], bool]) -> list[str]:
    """Send requests until the condition holds, and return the ids of their records."""
    ids: list[str] = []
    async with asyncio.timeout(300):
        while not done():
            ids.append(await _ask(client))
    return ids


async def test_a_file_that_is_renamed_without_a_signal(folder: Path) -> None:
    log, old = folder / "usage.jsonl", folder / "usage.jsonl.1"
    servicer = FakeTriton(tokens=ids_of(folder, "hello"), fault=None, step=0)
    async with (
        serving(servicer) as endpoint,
        running(folder, endpoint, usage_log=log) as (client, service, _),
    ):
        ids = [await _ask(client)]
        log.rename(old)
        ids += await _ask_until(client, log.exists)
        assert _ids(old) + _ids(log) == ids
        assert len(_ids(log)) == 1
        assert metric_of(service, LOST) == 0


async def test_a_file_that_is_replaced_without_a_signal(folder: Path) -> None:
    log, old = folder / "usage.jsonl", folder / "usage.jsonl.1"
    servicer = FakeTriton(tokens=ids_of(folder, "hello"), fault=None, step=0)
    async with (
        serving(servicer) as endpoint,
        running(folder, endpoint, usage_log=log) as (client, _, _),
    ):
        ids = [await _ask(client)]
        log.rename(old)
        log.touch()
        ids += await _ask_until(client, lambda: log.stat().st_size > 0)
        assert _ids(old) + _ids(log) == ids


@pytest.mark.parametrize("then", ["another request", "the end"])
async def test_a_file_that_is_deleted_without_a_signal(folder: Path, then: str) -> None:
    """Records written to the deleted file are written again to the new file."""
    log = folder / "usage.jsonl"
    servicer = FakeTriton(tokens=ids_of(folder, "hello"), fault=None, step=0)
    async with serving(servicer) as endpoint:
        async with running(folder, endpoint, usage_log=log) as (client, service, _):
            before = await _ask(client)
            log.unlink()
            ids = [await _ask(client)]
            if then == "another request":
                ids += await _ask_until(client, log.exists)
                assert metric_of(service, LOST) == 0
        found = _ids(log)
    assert found in (ids, [before, *ids])


def test_where_no_file_can_be_made(tmp_path: Path) -> None:
    """Records in a deleted file are lost and counted if no new file can be created.

    Records in a renamed file are not lost.
    """
    logs, away = tmp_path / "logs", tmp_path / "away"
    logs.mkdir()
    log = logs / "usage.jsonl"
    lost: list[int] = []
    own = UsageLog(log, lambda: lost.append(1))
    logs.rename(away)
    own.write(_usage(1))
    own.reopen_if_moved()
    assert _ids(away / "usage.jsonl") == ["a1"]
    (away / "usage.jsonl").unlink()
    own.write(_usage(2))
    own.write(_usage(3))
    own.reopen_if_moved()
    assert len(lost) == 2
    own.write(_usage(4))
    logs.mkdir()
    own.reopen_if_moved()
    own.write(_usage(5))
    assert _ids(log) == ["a4", "a5"]
    assert len(lost) == 2


async def test_a_disk_without_any_room_fails_no_request(folder: Path) -> None:
    servicer = FakeTriton(tokens=ids_of(folder, "hello"), fault=None, step=0)
    async with (
        serving(servicer) as endpoint,
        running(folder, endpoint, usage_log=Path("/dev/full")) as (client, service, _),
    ):
        for count in (1, 2):
            await _ask(client)
            assert metric_of(service, LOST) == count


def test_a_disk_that_is_full_loses_counted_lines_and_no_others(tmp_path: Path) -> None:
    lost: list[int] = []
    path = tmp_path / "usage.jsonl"
    log = UsageLog(path, lambda: lost.append(1))
    log.write(_usage(1))
    with full_disk(path.stat().st_size + 10):
        log.write(_usage(2))  # cut after 10 bytes
        log.write(_usage(3))  # refused
    log.write(_usage(4))
    log.close()
    log.write(_usage(5))
    assert _ids(path) == ["a1", "a4"]
    assert len(lost) == 3


@pytest.mark.parametrize("cut", [1, 10])
def test_a_cut_line_takes_no_line_of_another_worker_with_it(tmp_path: Path, cut: int) -> None:
    lost: list[int] = []
    path = tmp_path / "usage.jsonl"
    one, other = UsageLog(path, lambda: lost.append(1)), UsageLog(path, lambda: lost.append(1))
    one.write(_usage(1))
    with full_disk(path.stat().st_size + cut):
        one.write(_usage(2))
    other.write(_usage(3, "b"))
    one.write(_usage(4))
    assert _ids(path) == ["a1", "b3", "a4"]
    assert len(lost) == 1


def _write_cut_lines(path: Path, lost: Any) -> None:
    """Write lines from another process, some of which are cut, and count lost lines in `lost`."""
    logging.disable()  # standard error may be a file, to which the size limit applies as well
    log = UsageLog(path, lambda: setattr(lost, "value", lost.value + 1))
    chance = random.Random(1)
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for number in range(_CUT):
        room = chance.randint(1, 400)  # a line has some 200 bytes
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + room, hard))
        log.write(_usage(number))


@pytest.mark.slow
def test_lines_that_come_between_a_cut_and_its_mending_are_whole(tmp_path: Path) -> None:
    """No line of another process is damaged while one process repairs its cut lines."""
    path = tmp_path / "usage.jsonl"
    context = multiprocessing.get_context("spawn")
    lost = context.Value("i", 0)
    log = UsageLog(path, pytest.fail)
    worker = context.Process(target=_write_cut_lines, args=(path, lost))
    worker.start()
    written = 0
    while worker.is_alive():
        log.write(_usage(written, "b"))
        written += 1
        time.sleep(0)
    assert worker.exitcode == 0
    ids = _ids(path)
    assert len(ids) == len(set(ids))
    assert [own for own in ids if own[0] == "b"] == [f"b{number}" for number in range(written)]
    assert sum(own[0] == "a" for own in ids) == _CUT - lost.value
    assert lost.value > 100

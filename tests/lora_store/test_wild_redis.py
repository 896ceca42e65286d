"""A real Redis that strangers also write to: the store ignores invalid data and leaves it there."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import redis
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from adapters.errors import StoreError
from adapters.record_json import as_json
from adapters.registry import Registry
from lora_store import tiered
from lora_store.codec import CorruptBlob, encode
from lora_store.disk import Disk
from lora_store.redis import RedisTier
from lora_store.redis_values import dump, read_description, read_record
from lora_store.tiered import TieredStore
from tests.support.adapter_store import becomes, record
from tests.support.lora_files import content
from tests.support.redis_server import RedisServer

NAMES = "lora:names"
WILD = settings(
    max_examples=40,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
GOOD = as_json(record())
OUTSIDE = "../../victim/x"


def _hostile(**changes: Any) -> bytes:
    """Return a valid record in JSON, with some fields of its version replaced."""
    version = {**GOOD["versions"][0], **changes}
    served = changes.get("digest", GOOD["served"])
    return json.dumps({**GOOD, "served": served, "versions": [version]}).encode()


@contextmanager
def _only_in(root: Path, around: Path) -> Iterator[None]:
    """Check that no file in `around` changes, except files in `root`."""

    def seen() -> dict[Path, tuple[int, int]]:
        files = (path for path in around.rglob("*") if not path.is_relative_to(root))
        return {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in files}

    before = seen()
    yield
    assert seen() == before


async def test_a_digest_that_is_a_path_is_neither_read_nor_written(
    shared_redis: RedisServer, at_shared_redis: redis.Redis, tmp_path: Path
) -> None:
    root = tmp_path / "gateway" / "store"
    root.mkdir(parents=True)
    # The store would look in versions/<first two characters>/, so the path of this digest is
    # versions/../../../victim/x.lora.
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "x.lora").write_bytes(b"a neighbour's")
    head, weights = encode(content(1))
    at_shared_redis.set(f"lora:version:{OUTSIDE}", f"{len(head) + len(weights)} 1048576 1")
    at_shared_redis.set(f"lora:version:{OUTSIDE}:0", head + bytes(weights))
    at_shared_redis.hset(NAMES, mapping={"zh": _hostile(digest=OUTSIDE), "ja": dump(record("ja"))})
    with _only_in(root, tmp_path):
        async with TieredStore(
            Disk(root), RedisTier(shared_redis.settings()), memory_bytes=0, poll_s=0.05
        ) as store:
            assert set(await store.records()) == {"ja"}
            await becomes(lambda: store.stats.refused_values == 1)
            # A "wanted" notice makes the store check the named file, and quarantine it if it is
            # damaged.
            await becomes(lambda: at_shared_redis.publish("lora:changes", f"wanted {OUTSIDE}") > 0)
            await becomes(lambda: store.stats.refused_values == 2)
    assert json.loads(at_shared_redis.hget(NAMES, "zh"))["served"] == OUTSIDE, "left alone"
    assert not list((root / "quarantine").iterdir())


async def test_nothing_goes_while_a_record_may_name_what_nobody_here_can_read(
    shared_redis: RedisServer,
    at_shared_redis: redis.Redis,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing is collected while a record is unreadable, such as one by a newer release."""
    monkeypatch.setattr(tiered, "_COLLECT_S", 0.0)
    monkeypatch.setattr(tiered, "_GRACE_S", -1.0)
    at_shared_redis.hset(NAMES, mapping={"zh": _hostile(dtype="fp7"), "@revision": 1})
    with contextlib.closing(RedisTier(shared_redis.settings())) as tier:
        tier.put(content(1))
        async with TieredStore(
            Disk(tmp_path), RedisTier(shared_redis.settings()), memory_bytes=0, poll_s=0.02
        ) as store:
            for _ in range(5):  # an upkeep follows each sync
                done = store.stats.syncs
                at_shared_redis.hincrby(NAMES, "@revision", 1)
                await becomes(lambda done=done: store.stats.syncs > done)
            assert tier.has([content(1).digest])
            at_shared_redis.hdel(NAMES, "zh")
            at_shared_redis.hincrby(NAMES, "@revision", 1)
            await becomes(lambda: not tier.has([content(1).digest]))


ANY: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
    | st.sampled_from([10**400, -1, 2**63, "a" * 64, OUTSIDE, "attn_q", "float16", "NaN"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)  # fmt: skip
FIELDS = st.sampled_from(sorted({*GOOD, *GOOD["versions"][0]}))


@st.composite
def _records(draw: st.DrawFn) -> bytes:
    """Generate random bytes, or a valid record with some fields replaced or missing."""
    if draw(st.booleans()):
        raw: bytes = draw(
            st.binary(max_size=20)
            | ANY.map(lambda value: json.dumps(value).encode())
            | st.sampled_from([b"[" * 100_000, b'{"a":' * 100_000, b"9" * 10_000])
        )
        return raw
    value: dict[str, Any] = json.loads(json.dumps(GOOD))
    for part in draw(st.lists(st.sampled_from([value, value["versions"][0]]), max_size=2)):
        part[draw(FIELDS)] = draw(ANY)
    if draw(st.booleans()):
        value.pop(draw(FIELDS), None)
    return json.dumps(value).encode()


@given(_records())
@example(_hostile(digest=OUTSIDE))
@example(_hostile(modules=[["attn_q", 4, [True]]]))
@example(_hostile(created=float("nan")))
@example(_hostile(created=10**400))
@example(_hostile(task_id="1" * 5000))
@example(json.dumps({**GOOD, "name": "../x"}).encode())
@example(json.dumps({**GOOD, "life": True}).encode())
@example(json.dumps({**GOOD, "served": "b" * 64}).encode())
@example(json.dumps({**GOOD, "versions": GOOD["versions"] * 2}).encode())
def test_a_record_fits_or_is_refused(raw: bytes) -> None:
    try:
        found = read_record("zh", raw)
    except ValueError:
        return
    assert read_record("zh", dump(found)) == found
    assert found.is_removed or found.version.short_digest
    assert all(set(v.digest) <= set("0123456789abcdef") for v in found.versions)


@given(st.binary(max_size=30) | st.from_regex(rb"[0-9]{1,12} [0-9]{1,12} [0-9]{1,12}"))
def test_a_description_fits_or_is_refused(raw: bytes) -> None:
    try:
        found = read_description(raw)
    except ValueError:
        return
    assert len(found.chunks) <= 2**16
    assert sum(map(found.length, (found.chunks[0], found.chunks[-1]))) <= 2 * found.size


@WILD
@given(
    records=st.dictionaries(
        st.sampled_from([b"zh", b"ja", b"\xff", b"../x", b"@epoch", b"@revision"])
        | st.binary(min_size=1, max_size=8),
        _records(),
        max_size=4,
    ),
    description=st.binary(max_size=20) | st.sampled_from([b"1 0 1", b"9 9 9", b"-1 1 1", None]),
    notices=st.lists(
        st.binary(max_size=20) | st.sampled_from([b"wanted ../../x", b"wanted", b"changed"]),
        max_size=3,
    ),
)
def test_whatever_redis_holds_the_store_serves_what_is_its_own(
    shared_redis: RedisServer,
    at_shared_redis: redis.Redis,
    tmp_path_factory: pytest.TempPathFactory,
    records: dict[bytes, bytes],
    description: bytes | None,
    notices: list[bytes],
) -> None:
    folder = tmp_path_factory.mktemp("wild")
    root = folder / "store"
    own = replace(record("own"), life=3)
    at_shared_redis.flushall()
    for name, raw in records.items():
        at_shared_redis.hset(NAMES, name, raw)
    key = f"lora:version:{content(1).digest}"
    if description is None:
        at_shared_redis.lpush(key, "not a string")
    else:
        at_shared_redis.set(key, description)

    async def live() -> None:
        disk = Disk(root)
        disk.put(content(1))
        disk.put_record(own)
        async with TieredStore(
            disk, RedisTier(shared_redis.settings()), memory_bytes=0, poll_s=0.05
        ) as store:
            for notice in notices:
                at_shared_redis.publish("lora:changes", notice)
            assert store.stats.redis_up
            assert (await store.records())["own"] == own
            assert bytes((await store.get(content(1).digest)).weights)
            await Registry(store).add("mine", "demo", content(2), "test")
            # The store replaces the invalid description with the intact version from its disk.
            await becomes(lambda: _whole(shared_redis))

    with _only_in(root, folder):
        asyncio.run(live())
    for name, raw in records.items():
        stored = at_shared_redis.hget(NAMES, name)
        try:
            read_record(name.decode(), raw)
        except ValueError:
            # The store's own script may set @revision, and @epoch if there is none.
            assert stored == raw or name.startswith(b"@"), "left alone"


def _whole(shared_redis: RedisServer) -> bool:
    tier = RedisTier(shared_redis.settings())
    try:
        chunks = tier.fetch(content(1).digest)
        return chunks is not None and sum(map(len, chunks)) > 0
    except (StoreError, CorruptBlob):
        return False
    finally:
        tier.close()


async def test_asking_for_a_name_to_be_changed_mends_its_record(
    shared_redis: RedisServer, at_shared_redis: redis.Redis, tmp_path: Path
) -> None:
    at_shared_redis.hset(NAMES, "zh", b"garbage")
    async with TieredStore(
        Disk(tmp_path), RedisTier(shared_redis.settings()), memory_bytes=0
    ) as store:
        await becomes(lambda: store.stats.refused_values == 1)
        changed = await Registry(store).add("zh", "demo", content(1), "test")
        assert read_record("zh", at_shared_redis.hget(NAMES, "zh")) == changed

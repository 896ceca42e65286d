"""Adapter names, versions, and the merge of two copies of a record."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapters import errors
from adapters.adapter import Converted, ModuleRows, make_converted, task_id
from adapters.chat_template import MAX_CHARACTERS, ChatTemplate
from adapters.record import DeclaredContent, Record, Version, check_name, merge, split_selector
from adapters.record_json import as_json, from_json
from adapters.registry import Change, Registry, Snapshot


class DictStore:
    """The complete `Store` protocol on two dicts."""

    def __init__(self) -> None:
        self.tensors: dict[str, Converted] = {}
        self.known: dict[str, Record] = {}
        self.writes = 0

    async def get(self, digest: str) -> Converted:
        return self.tensors[digest]

    async def put(self, converted: Converted) -> None:
        self.tensors[converted.digest] = converted

    async def records(self) -> Mapping[str, Record]:
        return self.known

    async def change(self, name: str, change: Change) -> Record:
        before = self.known.get(name)
        record = change(before)
        if record is not before:
            self.known[name] = record
            self.writes += 1
        return record


def _content(number: int) -> Converted:
    return make_converted("float16", [(1, 0, 4)], 2, bytes([number, 0, 0, 0]))


async def _registry() -> tuple[Registry, DictStore]:
    store = DictStore()
    times = iter(range(1000, 2000))
    registry = Registry(store, clock=lambda: float(next(times)))
    await registry.load()
    return registry, store


async def test_a_name_serves_the_newest_content_and_keeps_the_older() -> None:
    registry, store = await _registry()
    first, second = _content(1), _content(2)
    await registry.add("zh", "demo", first, "test")
    record = await registry.add("zh", "demo", second, "test")
    assert [version.digest for version in record.versions] == [first.digest, second.digest]
    assert registry.snapshot.resolve("zh").digest == second.digest
    assert registry.snapshot.resolve(f"zh@{first.digest[:12]}").digest == first.digest
    assert registry.snapshot.resolve(f"zh@{first.digest}").digest == first.digest
    assert set(store.tensors) == {first.digest, second.digest}


async def test_the_same_content_again_changes_nothing() -> None:
    registry, store = await _registry()
    one = await registry.add("zh", "demo", _content(1), "test")
    assert await registry.add("zh", "demo", _content(1), "other words") == one
    assert store.writes == 1


async def test_old_content_again_is_served_without_a_new_version() -> None:
    registry, _ = await _registry()
    for number in (1, 2, 1):
        record = await registry.add("zh", "demo", _content(number), "test")
    assert record.served == _content(1).digest
    assert len(record.versions) == 2
    assert record.revision == 3


async def test_rollback_to_the_one_before_or_to_a_named_one() -> None:
    registry, _ = await _registry()
    for number in (1, 2, 3):
        await registry.add("zh", "demo", _content(number), "test")
    assert (await registry.rollback("zh")).served == _content(2).digest
    assert (await registry.rollback("zh")).served == _content(1).digest
    with pytest.raises(errors.UnknownVersion):
        await registry.rollback("zh")
    third = _content(3).digest
    assert (await registry.rollback("zh", third[:12])).served == third
    assert registry.snapshot.resolve("zh").digest == third


async def test_a_clock_that_is_behind_changes_no_order() -> None:
    store = DictStore()
    ahead, behind = Registry(store, clock=lambda: 1000.0), Registry(store, clock=lambda: 999.0)
    for registry, number in ((ahead, 1), (ahead, 2), (behind, 3)):
        await registry.load()
        record = await registry.add("zh", "demo", _content(number), "test")
    digests = [_content(number).digest for number in (1, 2, 3)]
    assert [version.digest for version in record.versions] == digests
    assert merge(record, record).versions == record.versions
    assert (await ahead.rollback("zh")).served == digests[1]


@pytest.mark.parametrize(
    ("steps", "then"),
    [
        ((1, 2, 3, 2), (3, 1)),
        ((1, 2, 1, 2, 1), (2,)),
        ((1, 2, None, 3), (1,)),
        ((1, 2, 3, None, None, 3), (1,)),
        ((1, 2, 3, 2, None, 4), (3, 1)),
    ],
)
async def test_rollback_goes_to_what_was_served_before(
    steps: tuple[int | None, ...], then: tuple[int, ...]
) -> None:
    """Check rollbacks after `steps`: each adds a version, or rolls back if None."""
    registry, _ = await _registry()
    for step in steps:
        if step is None:
            await registry.rollback("zh")
        else:
            await registry.add("zh", "demo", _content(step), "test")
    for number in then:
        assert (await registry.rollback("zh")).served == _content(number).digest
    with pytest.raises(errors.UnknownVersion):
        await registry.rollback("zh")


async def test_a_version_that_is_named_goes_back_as_well_or_on() -> None:
    registry, _ = await _registry()
    digests = [_content(number).digest for number in (1, 2, 3, 4)]
    for number in (1, 2, 3, 4):
        await registry.add("zh", "demo", _content(number), "test")
    await registry.rollback("zh", digests[1])
    assert (await registry.rollback("zh")).served == digests[0]
    await registry.rollback("zh", digests[3])
    assert (await registry.rollback("zh")).served == digests[0]


async def test_what_was_served_before_outlives_no_gateway_that_does_not_know_of_it() -> None:
    """Check a record that an older gateway wrote without the field `before`.

    Rollbacks then follow the order in which versions were added.
    """
    registry, store = await _registry()
    for number in (1, 2, 3, 2):
        record = await registry.add("zh", "demo", _content(number), "test")
    told = as_json(record)
    del told["before"]
    copy = from_json(told)
    # Merging two copies of the same change loses nothing.
    assert merge(record, copy) == merge(copy, record) == record
    store.known["zh"] = merge(record, replace(copy, revision=5, served=_content(3).digest))
    await registry.load()
    await registry.add("zh", "demo", _content(4), "test")
    for number in (3, 2, 1):
        assert (await registry.rollback("zh")).served == _content(number).digest


@pytest.mark.parametrize("before", [None, "", ["a" * 64], [1], "twice", "served"])
async def test_a_record_cannot_have_served_what_it_has_not(before: Any) -> None:
    registry, _ = await _registry()
    for number in (1, 2):
        record = await registry.add("zh", "demo", _content(number), "test")
    first, second = (version.digest for version in record.versions)
    told = as_json(record)
    assert told["before"] == [first]
    told["before"] = {"twice": [first, first], "served": [second]}.get(str(before), before)
    with pytest.raises(ValueError, match="before"):
        from_json(told)


async def test_remove_and_add_again_starts_a_new_life() -> None:
    registry, store = await _registry()
    await registry.add("zh", "demo", _content(1), "test")
    await registry.remove("zh")
    with pytest.raises(errors.UnknownAdapter):
        registry.snapshot.resolve("zh")
    with pytest.raises(errors.UnknownAdapter):
        await registry.remove("zh")
    with pytest.raises(errors.UnknownAdapter):
        await registry.rollback("zh")
    record = await registry.add("zh", "demo", _content(2), "test")
    assert (record.life, record.revision, len(record.versions)) == (2, 3, 1)
    assert store.known["zh"] == record


async def test_a_name_belongs_to_one_base() -> None:
    registry, store = await _registry()
    await registry.add("zh", "demo", _content(1), "test")
    with pytest.raises(errors.BaseMismatch, match="demo"):
        await registry.add("zh", "other", _content(2), "test")
    assert set(store.tensors) == {_content(1).digest}, "a refusal leaves no trace"
    # Another process may have given the name to its base model since.
    registry.refresh({})
    with pytest.raises(errors.BaseMismatch, match="demo"):
        await registry.add("zh", "other", _content(2), "test")


async def test_contents_that_share_63_bits_never_share_an_id() -> None:
    """Check two digests whose first 63 bits are equal, which an attacker could search for.

    The engine may still have the first adapter under that id.
    """
    registry, _ = await _registry()
    first = _content(1)
    other = replace(_content(2), digest=first.digest[:16] + "0" * 48)
    held = (await registry.add("zh", "demo", first, "test")).version.task_id
    await registry.remove("zh")
    again = await registry.add("zh", "demo", other, "test")
    assert again.version.task_id != held
    both = await registry.add("zh", "demo", first, "test")
    assert len({held, *(version.task_id for version in both.versions)}) == 3
    assert all(0 < version.task_id < 2**63 for version in both.versions)


async def test_one_content_has_one_id_under_all_its_names() -> None:
    registry, _ = await _registry()
    one = await registry.add("zh", "demo", _content(1), "test")
    other = await registry.add("ja", "demo", _content(1), "test")
    assert one.version.task_id == other.version.task_id


async def test_a_snapshot_never_changes() -> None:
    registry, _ = await _registry()
    await registry.add("zh", "demo", _content(1), "test")
    before = registry.snapshot
    await registry.add("zh", "demo", _content(2), "test")
    assert before.resolve("zh").digest == _content(1).digest
    with pytest.raises(TypeError):
        before.records["zh"] = before.records["zh"]  # type: ignore[index]


def test_unknown_names_and_versions() -> None:
    version = Version(
        digest="ab" * 32,
        weights="ab" * 32,
        base="demo",
        dtype="float16",
        created=1.0,
        nbytes=4,
        modules=(ModuleRows("attn_q", 4, (0,)),),
        source="",
        task_id=1,
    )
    other = replace(version, digest="ab" * 8 + "cd" * 24)
    record = Record(
        name="zh", life=1, revision=1, updated=1.0, served=version.digest, versions=(version, other)
    )
    snapshot = Snapshot.of([record])
    assert snapshot.resolve("zh@" + "ab" * 32) == version
    with pytest.raises(errors.UnknownAdapter):
        snapshot.resolve("ja")
    with pytest.raises(errors.UnknownVersion, match="abababababab"):
        snapshot.resolve("zh@" + "0" * 12)
    with pytest.raises(errors.UnknownVersion):
        snapshot.resolve("zh@" + "ab" * 6)


@pytest.mark.parametrize("name", ["zh", "tenant/zh", "a.b-c_D", "0", "x" * 64, "a" * 64 + "/b"])
def test_good_names(name: str) -> None:
    assert check_name(name) == name


@pytest.mark.parametrize(
    "name",
    ["", "/", "a/", "/a", "a/b/c", "..", ".", "a/..", "a..b", "a b", "a@b", "é", "x" * 65, "a\n"],
)
def test_bad_names(name: str) -> None:
    with pytest.raises(errors.InvalidName) as caught:
        check_name(name)
    assert caught.value.allowed


@given(st.text(max_size=20))
def test_a_checked_name_is_safe_as_a_path_and_in_a_selector(name: str) -> None:
    try:
        check_name(name)
    except errors.InvalidName:
        return
    assert ".." not in name
    assert not name.startswith("/")
    assert split_selector(name) == (name, None)
    assert split_selector(f"{name}@{'0' * 12}") == (name, "0" * 12)


@pytest.mark.parametrize("model", ["zh@", "zh@0123", "zh@" + "A" * 12, "zh@" + "0" * 65, "a@b@c"])
def test_bad_selectors(model: str) -> None:
    with pytest.raises(errors.InvalidName):
        split_selector(model)


_MODULES = (ModuleRows("attn_q", 4, (0, 1)), ModuleRows("attn_v", 8, (0,)))
_OLD = Version(
    digest="5a" * 32,
    weights="5a" * 32,
    base="demo",
    dtype="float16",
    created=1.0,
    nbytes=4,
    modules=_MODULES,
    source="test",
    task_id=7,
)


def _version(
    weights: str,
    created: int,
    source: str,
    task_id: int,
    template: ChatTemplate | None,
    added_by: str | None = None,
    tp_size: int | None = None,
) -> Version:
    return replace(
        _OLD,
        digest=template.digest(weights) if template else weights,
        weights=weights,
        created=float(created),
        source=source,
        task_id=task_id,
        chat_template=template,
        added_by=added_by,
        tp_size=tp_size,
    )


_VERSIONS = st.builds(
    _version,
    st.sampled_from(["a" * 64, "b" * 64, "c" * 64]),
    st.integers(1, 3),
    st.sampled_from(["x", "y"]),
    st.sampled_from([1, 2**63 - 1]),
    st.sampled_from([None, ChatTemplate("{{ a }}"), ChatTemplate("{{ a }}", "</s>")]),
    st.sampled_from([None, "configuration", "sha256:01234567"]),
    st.sampled_from([None, 1, 2]),
)


@st.composite
def _records(draw: st.DrawFn) -> Record:
    versions = draw(st.lists(_VERSIONS, max_size=3, unique_by=lambda version: version.digest))
    ordered = tuple(sorted(versions, key=lambda v: (v.created, v.digest, v.source, v.task_id)))
    served = draw(st.sampled_from([v.digest for v in versions])) if versions else ""
    others = [v.digest for v in versions if v.digest != served]
    before = st.lists(st.sampled_from(others), unique=True) if others else st.just([])
    declared = st.builds(DeclaredContent, st.integers(1, 3), st.sampled_from(["a" * 64, "b" * 64]))
    return Record(
        name="zh",
        life=draw(st.integers(1, 2)),
        revision=draw(st.integers(1, 3)),
        updated=float(draw(st.integers(1, 2))),
        served=served,
        versions=ordered,
        declared=draw(st.none() | declared) if versions else None,
        before=draw(st.none() | before.map(tuple)) if versions else None,
    )


@given(_records(), _records(), _records())
def test_merge_does_not_depend_on_order_or_repetition(a: Record, b: Record, c: Record) -> None:
    assert merge(a, b) == merge(b, a)
    assert merge(merge(a, b), c) == merge(a, merge(b, c))
    assert merge(a, a) == a
    assert merge(merge(a, b), b) == merge(a, b)


@given(_records(), _records())
def test_merge_loses_nothing_but_what_was_removed(a: Record, b: Record) -> None:
    merged = merge(a, b)
    if not merged.is_removed:
        assert merged.version in merged.versions
    for record in (a, b):
        if record.life == merged.life and not merged.is_removed:
            known = {version.digest for version in merged.versions}
            assert known >= {version.digest for version in record.versions}
        if record.is_removed and record.life == merged.life:
            assert merged.is_removed


@given(_records())
def test_records_survive_json(record: Record) -> None:
    assert from_json(json.loads(json.dumps(as_json(record)))) == record


def test_the_copy_that_says_its_tp_size_wins() -> None:
    """Check that `tp_size` survives a copy from an older gateway, which writes none."""
    value: dict[str, Any] = {"name": "zh", "life": 1, "updated": 1.0, "served": _OLD.digest}
    signed, bare = (
        Record(**value, revision=revision, versions=(replace(_OLD, tp_size=tp_size),))
        for revision, tp_size in ((1, 2), (2, None))
    )
    assert merge(signed, bare).version.tp_size == 2
    written = as_json(bare)["versions"][0]
    assert "tp_size" not in written
    for tp_size in (0, "2", None, True):
        changed = as_json(signed)
        changed["versions"][0]["tp_size"] = tp_size
        with pytest.raises(ValueError, match="tp_size"):
            from_json(changed)


def test_versions_from_before_ids_were_drawn_keep_theirs() -> None:
    record = Record(
        name="zh", life=1, revision=1, updated=1.0, served=_OLD.digest, versions=(_OLD,)
    )
    value = as_json(record)
    del value["versions"][0]["task_id"]
    assert from_json(value).version.task_id == task_id(_OLD.digest)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("chat_template", {"source": "{{ b }}"}),
        ("chat_template", {"source": 1}),
        ("chat_template", {"source": "x" * (MAX_CHARACTERS + 1)}),
        ("weights", "b" * 64),
        ("weights", "../" * 20),
        ("weights", None),
    ],
)
def test_a_template_that_is_not_its_versions_is_no_record(field: str, value: Any) -> None:
    version = _version("a" * 64, 1, "x", 1, ChatTemplate("{{ a }}"))
    record = Record(
        name="zh", life=1, revision=1, updated=1.0, served=version.digest, versions=(version,)
    )
    told = as_json(record)
    assert from_json(told) == record
    told["versions"][0][field] = value
    with pytest.raises(ValueError, match=r"digest|weights|chat_template"):
        from_json(told)


def test_a_copy_whose_template_was_left_out_does_not_win() -> None:
    """Check that a chat template survives a copy from an older gateway, which writes none."""
    version = _version("a" * 64, 1, "x", 1, ChatTemplate("{{ a }}"))
    record = Record(
        name="zh", life=1, revision=1, updated=1.0, served=version.digest, versions=(version,)
    )
    told = as_json(record)
    del told["versions"][0]["weights"], told["versions"][0]["chat_template"]
    bare = replace(from_json(told), revision=2)
    for merged in merge(record, bare), merge(bare, record):
        assert (merged.revision, merged.versions) == (2, (version,))


def test_who_added_a_version_outlives_a_gateway_that_does_not_know_of_it() -> None:
    """Check that `added_by` survives a copy from an older gateway, which writes none."""
    version = _version("a" * 64, 1, "https://a/b", 1, None, "sha256:01234567")
    record = Record(
        name="zh", life=1, revision=1, updated=1.0, served=version.digest, versions=(version,)
    )
    told = as_json(record)
    assert from_json(told) == record
    del told["versions"][0]["added_by"]
    older = replace(from_json(told), revision=2)
    assert older.version.added_by is None
    for merged in merge(record, older), merge(older, record):
        assert (merged.revision, merged.versions) == (2, (version,))


async def test_another_template_is_another_version_of_the_same_weights() -> None:
    registry, _ = await _registry()
    first = await registry.add("zh", "demo", _content(1), "test")
    record = await registry.add("zh", "demo", _content(1), "test", ChatTemplate("{{ a }}"))
    plain, templated = record.versions
    assert record.served == templated.digest != plain.digest == first.served
    assert templated.weights == plain.weights == plain.digest
    assert templated.task_id == plain.task_id
    assert (await registry.rollback("zh")).version.chat_template is None


async def test_a_rollback_holds_until_another_content_is_declared() -> None:
    registry, store = await _registry()

    async def declare(number: int) -> Record:
        return await registry.add("zh", "demo", _content(number), "test", declared=True)

    await declare(1)
    await declare(2)
    held = await registry.rollback("zh")
    # A new process knows only what the store has.
    registry = Registry(store)
    await registry.load()
    assert await declare(2) == held
    assert (await declare(1)).served == _content(1).digest
    assert (await declare(2)).served == _content(2).digest
    # A removed name that is declared again starts a new life.
    await registry.remove("zh")
    assert (await declare(2)).life == 2


async def test_what_is_declared_of_a_record_from_before_changes_nothing_that_is_served() -> None:
    registry, _ = await _registry()
    for number in (1, 2):
        await registry.add("zh", "demo", _content(number), "test")
    before = await registry.rollback("zh")
    record = await registry.add("zh", "demo", _content(2), "test", declared=True)
    assert (record.served, record.declared) == (before.served, (4, _content(2).digest))
    # An older gateway writes the record without `declared`.
    told = as_json(record) | {"revision": 5, "served": _content(2).digest}
    del told["declared"]
    merged = merge(record, from_json(told))
    assert (merged.served, merged.declared) == (_content(2).digest, record.declared)

"""Adapter folders for an engine: complete or absent, within `max_bytes`, not removed in use."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest

from adapters.adapter import Converted
from adapters.base_model import read_base_model
from adapters.convert import convert
from adapters.errors import StoreError
from adapters.peft import read
from adapters.peft_files import peft_files
from adapters.record import Record, Version
from lora_store.peft_folders import PeftFolders
from lora_store.peft_keeper import EngineLimits, PeftDiskManager, WantedVersion, list_wanted
from tests.support.full_disk import full_disk
from tests.support.lora_files import (
    BASE,
    SIZES,
    Q,
    content,
    linear_content,
    pair,
    qv_tensors,
    write_peft,
)

GRACE_S = 900.0
CONTENTS = {linear_content(n).digest: linear_content(n) for n in range(10)}
DIGESTS = list(CONTENTS)
SIZE = peft_files(linear_content(0), BASE).nbytes


class World:
    """A `PeftDiskManager` over a real folder, with a clock and gateways that the test controls."""

    def __init__(self, root: Path, max_bytes: int | None = None) -> None:
        self.now = 0.0
        self.folders = PeftFolders(root)
        assert self.folders.take()
        self.used: set[str] = set()
        self.seen = 1000
        self.keeper = PeftDiskManager(
            self.folders, max_bytes=max_bytes, grace_s=GRACE_S, clock=lambda: self.now
        )

    def fetch(self, digest: str) -> Converted:
        if digest not in CONTENTS:
            raise StoreError("it is not there")
        return CONTENTS[digest]

    def unused(self, digest: str, revision: int) -> bool:
        return revision <= self.seen and digest not in self.used

    def acts(self, *numbers: int, nbytes: int = SIZE, sure: bool = True) -> bool:
        wanted = [WantedVersion(DIGESTS[n], nbytes) for n in numbers]
        return self.keeper.act(wanted, self.fetch, BASE, self.unused if sure else None)

    def settle(self, *numbers: int, nbytes: int = SIZE, sure: bool = True) -> None:
        for _ in range(100):
            if not self.acts(*numbers, nbytes=nbytes, sure=sure):
                return
        pytest.fail("it never comes to rest")

    def holds(self, *numbers: int) -> bool:
        """Return True if exactly these versions are stored, readable and reported as available."""
        digests = {DIGESTS[n] for n in numbers}
        for digest in digests:
            assert convert(read(self.root / digest), BASE).digest != ""
        return digests == self.folders.list_versions().keys() == self.keeper.available

    @property
    def root(self) -> Path:
        return self.folders._root


def test_what_is_wanted_comes_in_its_order_and_is_what_was_converted(tmp_path: Path) -> None:
    world = World(tmp_path)
    assert world.acts(2, 0)
    assert world.holds(2)
    world.settle(2, 0)
    assert world.holds(0, 2)
    folder = tmp_path / DIGESTS[0]
    config = json.loads((folder / "adapter_config.json").read_text())
    assert (config["r"], config["target_modules"]) == (4, ["q_proj"])
    files = peft_files(CONTENTS[DIGESTS[0]], BASE)
    assert (folder / "adapter_model.safetensors").read_bytes() == b"".join(files.weights())


def test_it_goes_when_its_grace_is_over_and_nobody_runs_anything_with_it(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.settle(0, 1)
    world.used = {DIGESTS[1]}
    world.settle(0)
    world.now = GRACE_S - 1
    world.settle(0)
    assert world.holds(0, 1)
    world.now = GRACE_S + 1
    world.settle(0)
    # The version is reported as unavailable, but its files stay for the request that still uses it.
    assert world.keeper.available == {DIGESTS[0]}
    assert DIGESTS[1] in world.folders.list_versions()
    world.used = set()
    world.settle(0)
    assert world.holds(0)


def test_it_waits_for_gateways_that_have_not_seen_it_withdrawn(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.settle(0)
    world.settle()
    world.now, world.seen = GRACE_S + 1, world.keeper.revision
    world.settle()
    assert DIGESTS[0] in world.folders.list_versions()
    world.seen = world.keeper.revision
    world.settle()
    assert world.holds()


def test_what_is_named_again_is_held_again(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.settle(0)
    world.used = {DIGESTS[0]}
    world.settle()
    world.now = GRACE_S + 1
    world.settle()
    assert not world.keeper.available
    before = world.keeper.revision
    world.settle(0)
    assert world.holds(0)
    assert world.keeper.revision > before


def test_nothing_goes_while_it_is_not_sure_what_is_named(tmp_path: Path) -> None:
    world = World(tmp_path, 2 * SIZE)
    world.settle(0, 1)
    world.settle(sure=False)
    world.now = 2 * GRACE_S
    world.settle(2, sure=False)
    assert world.holds(0, 1)


def test_the_bound_holds_at_every_moment_and_the_most_wanted_are_held(tmp_path: Path) -> None:
    world = World(tmp_path, 3 * SIZE + SIZE // 2)
    for _ in range(100):
        acted = world.acts(0, 1, 2, 3, 4)
        assert sum(world.folders.list_versions().values()) <= 3 * SIZE + SIZE // 2
        if not acted:
            break
    assert world.holds(0, 1, 2)
    assert world.keeper.lacks.keys() == {DIGESTS[3], DIGESTS[4]}
    assert set(world.keeper.lacks.values()) == {f"it does not fit into {3.5 * SIZE:g} bytes"}
    # The newest version has precedence: the least wanted one is withdrawn at once, and removed when
    # no request uses it any more.
    world.used = {DIGESTS[2]}
    world.settle(5, 0, 1, 2, 3, 4)
    assert world.keeper.available == {DIGESTS[0], DIGESTS[1]}
    assert DIGESTS[2] in world.folders.list_versions()
    world.used = set()
    world.settle(5, 0, 1, 2, 3, 4)
    assert world.holds(5, 0, 1)


def test_what_no_name_names_goes_first(tmp_path: Path) -> None:
    world = World(tmp_path, 3 * SIZE)
    world.settle(0, 1, 2)
    world.settle(1, 2, 3)
    assert world.holds(1, 2, 3)


@pytest.mark.parametrize("guess", [1, 2 * SIZE])
def test_a_wrong_guess_of_a_size_is_made_good(tmp_path: Path, guess: int) -> None:
    world = World(tmp_path, 2 * SIZE)
    world.settle(0, 1, 2, nbytes=guess)
    assert len(world.folders.list_versions()) in (1, 2)
    assert world.keeper.nbytes <= 2 * SIZE


def test_a_smaller_bound_makes_it_smaller(tmp_path: Path) -> None:
    world = World(tmp_path, 3 * SIZE)
    world.settle(0, 1, 2)
    world.folders.close()
    again = World(tmp_path, SIZE)
    again.settle(0, 1, 2)
    assert again.holds(0)


def test_what_a_killed_process_left_is_swept_and_one_process_works_at_a_time(
    tmp_path: Path,
) -> None:
    world = World(tmp_path)
    world.settle(0)
    other = PeftFolders(tmp_path)
    assert not other.take()
    for ending in ("tmp", "gone"):
        half = tmp_path / f".{DIGESTS[1]}.00.{ending}"
        half.mkdir()
        (half / "adapter_config.json").write_text("{")
    assert other.list_versions().keys() == {DIGESTS[0]}
    world.folders.close()
    assert other.take()
    assert {path.name for path in tmp_path.iterdir()} == {".lock", DIGESTS[0]}


def test_a_full_disk_leaves_nothing_half_written(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.settle(0)
    with full_disk(400):
        world.settle(0, 1)
    assert {path.name for path in tmp_path.iterdir()} == {".lock", DIGESTS[0]}
    world.now = 2.0
    world.settle(0, 1)
    assert world.holds(0, 1)


def test_a_full_disk_is_tried_ever_more_seldom(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.settle(0)
    tried = []
    fetch = world.fetch

    def counted(digest: str) -> Converted:
        tried.append(world.now)
        return fetch(digest)

    wanted = [WantedVersion(digest, SIZE) for digest in DIGESTS]
    with full_disk(400):
        for world.now in range(300):
            world.keeper.act(wanted, counted, BASE, world.unused)
    assert len(tried) <= 12  # of nine missing versions
    gaps = [later - earlier for earlier, later in itertools.pairwise(tried)]
    assert gaps == sorted(gaps)
    assert gaps[-1] == 60
    # The next attempt, at most 60 s later, finds free space, and all missing versions are written.
    world.now += 60
    world.settle(*range(10))
    assert world.holds(*range(10))


def test_what_the_engine_was_not_loaded_for_is_told_and_not_brought(tmp_path: Path) -> None:
    folders = PeftFolders(tmp_path)
    assert folders.take()
    limits = EngineLimits(max_rank=8, modules=frozenset({"attn_qkv"}))
    keeper = PeftDiskManager(folders, max_bytes=None, grace_s=GRACE_S, limits=limits)
    q, dense = frozenset({"attn_q"}), frozenset({"attn_q", "attn_dense"})
    runs, large, strange = (
        WantedVersion(DIGESTS[n], SIZE, rank, modules)
        for n, rank, modules in ((0, 8, q), (1, 9, q), (2, 8, dense))
    )
    while keeper.act([large, strange, runs], CONTENTS.__getitem__, BASE, None):
        pass
    assert keeper.available == folders.list_versions().keys() == {runs.digest}
    assert keeper.refused == {
        large.digest: "its rank is 9; the engine's max_lora_rank is 8",
        strange.digest: "it has attn_dense; the engine's lora_target_modules are attn_qkv",
    }


def test_rows_of_zeros_for_another_runtime_are_nothing_that_the_engine_lacks(
    tmp_path: Path,
) -> None:
    trains_k = qv_tensors() | pair(Q.replace("q_proj", "k_proj"), 4, SIZES["k_proj"])
    contents = {
        name: convert(read(write_peft(tmp_path / name, tensors)), BASE)
        for name, tensors in (("qv", qv_tensors()), ("qkv", trains_k))
    }
    # Both adapters have a LoRA row for k; that of `qv` is all zeros.
    assert {each.module for each in contents["qv"].modules} == {"attn_q", "attn_k", "attn_v"}
    qv, qkv = list_wanted(
        [_record("qv", 2.0, contents["qv"]), _record("qkv", 1.0, contents["qkv"])]
    )
    fetch = {each.digest: each for each in contents.values()}.__getitem__
    folders = PeftFolders(tmp_path / "disk")
    assert folders.take()
    limits = EngineLimits(modules=frozenset({"attn_q", "attn_v"}))
    keeper = PeftDiskManager(folders, max_bytes=None, grace_s=GRACE_S, limits=limits)
    while keeper.act([qkv, qv], fetch, BASE, None):
        pass
    assert keeper.available == folders.list_versions().keys() == {qv.digest}
    assert keeper.refused == {
        qkv.digest: "it has attn_k; the engine's lora_target_modules are attn_q, attn_v"
    }


def test_what_cannot_be_had_now_keeps_nothing_else_waiting(tmp_path: Path) -> None:
    world = World(tmp_path)
    wanted = [WantedVersion("f" * 64, SIZE), WantedVersion(DIGESTS[0], SIZE)]
    assert world.keeper.act(wanted, world.fetch, BASE, world.unused)
    assert world.holds(0)


def test_what_has_no_peft_form_is_told_and_takes_no_room(tmp_path: Path) -> None:
    world = World(tmp_path, 2 * SIZE)
    strange = content(1)
    wanted = [
        WantedVersion(strange.digest, SIZE),
        *[WantedVersion(DIGESTS[n], SIZE) for n in (0, 1)],
    ]

    def fetch(digest: str) -> Converted:
        return strange if digest == strange.digest else CONTENTS[digest]

    while world.keeper.act(wanted, fetch, BASE, world.unused):
        pass
    assert world.holds(0, 1)
    assert "attn_q of layer 0" in world.keeper.refused[strange.digest]
    # The refusal of a version is dropped when no name uses the version. If a name uses it again,
    # the keeper checks it again.
    before = world.keeper.revision
    world.settle(0, 1)
    assert world.keeper.refused == {}
    assert world.keeper.revision > before
    while world.keeper.act(wanted, fetch, BASE, world.unused):
        pass
    assert world.keeper.refused.keys() == {strange.digest}


def test_folders_that_somebody_took_away_come_back(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.settle(0, 1)
    (tmp_path / DIGESTS[1] / "adapter_model.safetensors").unlink()
    before = world.keeper.revision
    world.now = 60.0
    world.settle(0, 1)
    assert world.holds(0, 1)
    assert world.keeper.revision > before


def _record(name: str, updated: float, *contents: int | Converted) -> Record:
    """Return the record of a name whose last content is served.

    A content given as a number n is version n of `CONTENTS`, created at time n.
    """
    versions = tuple(
        Version.of(CONTENTS[DIGESTS[each]], "demo", float(each), "test", each + 1)
        if isinstance(each, int)
        else Version.of(each, "demo", 0.0, "test", 1)
        for each in contents
    )
    return Record(
        name=name,
        life=1,
        revision=len(contents),
        updated=updated,
        served=versions[-1].digest if versions else "",
        versions=versions,
    )


def test_fused_layers_are_taken_apart_as_they_were_laid_out(tmp_path: Path) -> None:
    """Split fused layers by the tp_size that the version was converted with.

    The base model no longer says the engine's tp_size, and an older record of the content lacks it.
    """
    data = Path(__file__).parents[1] / "data" / "lora"
    base = read_base_model(data / "base-phi3", (), dtype="float16")
    one, two = (
        convert(read(data / "phi3-all-r4"), replace(base, tp_size=tp_size)) for tp_size in (1, 2)
    )
    records = [_record("old", 2.0, replace(two, tp_size=None)), _record("new", 1.0, two)]
    keeper = World(tmp_path).keeper
    # `fetch` returns no tp_size, as a store stores only the tensors.
    while keeper.act(list_wanted(records), lambda _: replace(two, tp_size=None), base, None):
        pass
    files = peft_files(one, base)
    written = tmp_path / two.digest / "adapter_model.safetensors"
    assert written.read_bytes() == b"".join(files.weights())


def test_the_served_come_first_and_the_latest_of_them_before_the_others() -> None:
    records = [_record("a", 5.0, 0, 1), _record("b", 9.0, 3, 2), _record("gone", 99.0)]
    assert [each.digest for each in list_wanted(records)] == [DIGESTS[n] for n in (2, 1, 3, 0)]
    both = [*records, _record("c", 20.0, 0)]
    assert [each.digest for each in list_wanted(both)] == [DIGESTS[n] for n in (0, 2, 1, 3)]

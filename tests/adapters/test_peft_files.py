"""Hostile and damaged PEFT files: each refusal is an AdapterError, in bounded time."""

from __future__ import annotations

import json
import os
import pickle
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapters import errors, peft
from adapters.adapter import Adapter, Converted, TensorInfo
from adapters.base_model import BaseModel
from adapters.convert import convert
from adapters.plan import MAX_CONVERTED_BYTES, plan
from tests.support.examples import scale_examples
from tests.support.lora_files import BASE, CONFIG, key, qv_tensors, write_peft

WEIGHTS = "adapter_model.safetensors"


def _convert(folder: Path, base: BaseModel = BASE) -> Converted:
    return convert(peft.read(folder), base)


def test_pickle_only_adapter_has_its_own_error(tmp_path: Path) -> None:
    folder = write_peft(tmp_path, qv_tensors())
    (folder / WEIGHTS).unlink()
    (folder / "adapter_model.bin").write_bytes(pickle.dumps({}))
    with pytest.raises(errors.PickleRefused, match="safetensors"):
        peft.read(folder)


@pytest.mark.parametrize("name", ["adapter_config.json", WEIGHTS])
def test_missing_file_and_folder_in_its_place(tmp_path: Path, name: str) -> None:
    folder = write_peft(tmp_path, qv_tensors())
    (folder / name).unlink()
    with pytest.raises(errors.MissingFile, match=name):
        peft.read(folder)
    (folder / name).mkdir()
    with pytest.raises(errors.MissingFile, match="regular file"):
        peft.read(folder)


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"\xff", b"[" * 100_000])
def test_malformed_config(tmp_path: Path, content: bytes) -> None:
    folder = write_peft(tmp_path, qv_tensors())
    (folder / "adapter_config.json").write_bytes(content)
    with pytest.raises(errors.CorruptFile):
        peft.read(folder)


def _header(entries: str) -> bytes:
    return len(entries).to_bytes(8, "little") + entries.encode()


@pytest.mark.parametrize(
    ("entries", "data", "words"),
    [
        ('{"a": %s, "b": %s}', [(0, 8), (12, 20)], "no holes"),
        ('{"a": %s, "b": %s}', [(0, 8), (4, 12)], "no overlaps"),
        ('{"a": %s, "b": %s}', [(4, 12), (12, 20)], "no holes"),
        ('{"a": %s, "a": %s}', [(0, 8), (8, 16)], "distinct names"),
        ('{"a": %s, "b": %s}', [(0, 8), (8, 24)], "8 bytes for [2]"),
        ('{"a": %s, "b": %s}', [(8, 0), (8, 16)], "begin <= end"),
        ('{"a": %s, "b": %s}', [(-8, 0), (0, 8)], "begin <= end"),
        ("[%s, %s]", [(0, 8), (8, 16)], "a JSON object"),
        ('{"a": 3, "b": %s, "c": %s}', [(0, 8), (8, 16)], "dtype, shape and data_offsets"),
    ],
)
def test_safetensors_header_that_contradicts_itself(
    tmp_path: Path, entries: str, data: list[tuple[int, int]], words: str
) -> None:
    folder = write_peft(tmp_path, qv_tensors())
    tensor = '{"dtype": "F32", "shape": [2], "data_offsets": [%d, %d]}'
    raw = _header(entries % tuple(tensor % offsets for offsets in data))
    (folder / WEIGHTS).write_bytes(raw + bytes(max(end for _, end in data)))
    with pytest.raises(errors.CorruptFile) as caught:
        peft.read(folder)
    assert words in str(caught.value)


@pytest.mark.parametrize("length", [0, 1, 2**20, 2**63])
def test_safetensors_header_length_that_cannot_be(tmp_path: Path, length: int) -> None:
    folder = write_peft(tmp_path, qv_tensors())
    raw = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(length.to_bytes(8, "little") + raw[8:])
    with pytest.raises(errors.CorruptFile, match="no length of a header"):
        peft.read(folder)


def test_link_out_of_the_allowed_folder(tmp_path: Path) -> None:
    outside = write_peft(tmp_path / "outside", qv_tensors())
    root = tmp_path / "root"
    folder = root / "evil"
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(json.dumps(CONFIG))
    (folder / WEIGHTS).symlink_to(outside / WEIGHTS)
    assert peft.read(folder)
    with pytest.raises(errors.PathEscape):
        peft.read(folder, within=root)
    with pytest.raises(errors.PathEscape):
        peft.read(root / ".." / "outside", within=root)


def test_size_limit(tmp_path: Path) -> None:
    folder = write_peft(tmp_path, qv_tensors())
    size = (folder / WEIGHTS).stat().st_size
    peft.read(folder, max_bytes=size)
    with pytest.raises(errors.TooLarge):
        peft.read(folder, max_bytes=size - 1)


def test_more_than_one_grpc_message_can_hold_is_refused_before_memory_is_taken(
    tmp_path: Path,
) -> None:
    layers, hidden, rank = 1100, 2**14, 64
    base = replace(
        BASE,
        num_hidden_layers=layers,
        hidden_size=hidden,
        head_size=hidden // 2,
        max_lora_rank=rank,
    )
    shapes = {"A": (rank, hidden), "B": (12, rank)}
    tensors = {
        key(f"model.layers.{layer}.mlp.up_proj", side): TensorInfo("F16", shape, 0, 0)
        for layer in range(layers)
        for side, shape in shapes.items()
    }
    settings = peft.read(write_peft(tmp_path, qv_tensors(), r=rank)).settings
    adapter = Adapter(settings, tmp_path, (0, 0, 0), tensors)
    with pytest.raises(errors.TooLarge, match="gRPC"):
        plan(adapter, base)
    fitting = MAX_CONVERTED_BYTES // (rank * (hidden + 12) * 2)
    for layer in range(fitting, layers):
        for side in "AB":
            tensors.pop(key(f"model.layers.{layer}.mlp.up_proj", side))
    assert len(plan(adapter, base)) == fitting


def test_file_that_changes_between_reading_and_converting(tmp_path: Path) -> None:
    folder = write_peft(tmp_path, qv_tensors())
    adapter = peft.read(folder)
    write_peft(folder, qv_tensors(seed=2))
    os.utime(folder / WEIGHTS, (1, 1))
    with pytest.raises(errors.CorruptFile, match="changed"):
        convert(adapter, BASE)


@scale_examples(5)
@given(data=st.data())
def test_no_damage_to_the_file_passes_unnoticed_as_a_crash(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Check truncated and overwritten files: an `AdapterError`, or equal shapes with other values.

    A safetensors file has no checksum, so changed values alone go unnoticed.
    """
    folder = write_peft(tmp_path_factory.mktemp("a"), qv_tensors())
    raw = bytearray((folder / WEIGHTS).read_bytes())
    if data.draw(st.booleans(), label="cut"):
        raw = raw[: data.draw(st.integers(0, len(raw) - 1), label="length")]
        cut = True
    else:
        header = 8 + int.from_bytes(raw[:8], "little")
        start = data.draw(st.integers(0, header), label="start")
        junk = data.draw(st.binary(min_size=1, max_size=40), label="junk")
        raw[start : start + len(junk)] = junk
        cut = False
    (folder / WEIGHTS).write_bytes(raw)
    try:
        converted = _convert(folder)
    except errors.AdapterError:
        return
    assert not cut
    assert converted.rows == 6

"""Import and export of the files of TensorRT-LLM's own converter."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapters import errors, npy, peft
from adapters.adapter import Converted
from adapters.convert import convert
from tests.support.cpu import costs_less_than
from tests.support.examples import scale_examples
from tests.support.lora_files import BASE, Array, pair, qv_tensors, unpack, write_peft


def _converted(folder: Path, dtype: str = "float16") -> Converted:
    tensors = qv_tensors() | pair("model.layers.1.mlp.down_proj", 4, (12, 8))
    base = replace(BASE, dtype=dtype)  # type: ignore[arg-type]
    return convert(peft.read(write_peft(folder / "peft", tensors)), base)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_what_is_written_is_read_back(tmp_path: Path, dtype: str) -> None:
    converted = _converted(tmp_path, dtype)
    npy.write(converted, tmp_path)
    weights = np.load(tmp_path / "model.lora_weights.npy")
    assert weights.shape == (1, converted.rows, converted.width)
    assert weights.dtype == (np.float16 if dtype == "float16" else np.dtype("V2"))
    assert np.load(tmp_path / "model.lora_config.npy").shape == (1, converted.rows, 3)
    again = npy.read(tmp_path, replace(BASE, dtype=dtype))  # type: ignore[arg-type]
    assert again.digest == converted.digest


def test_older_name_other_row_order_and_dora_column_of_zeros(tmp_path: Path) -> None:
    converted = _converted(tmp_path)
    weights, config = _arrays(converted)
    order = np.random.default_rng(3).permutation(converted.rows)
    wide = np.concatenate([config[:, order], np.zeros((1, converted.rows, 1), np.int32)], axis=2)
    _save(tmp_path, weights[:, order], wide, config_name="model.lora_keys.npy")
    assert npy.read(tmp_path, BASE).digest == converted.digest


def test_rows_that_the_converter_leaves_out_are_added(tmp_path: Path) -> None:
    """Check a file without the zero rows of k, which hf_lora_convert.py leaves out."""
    converted = _converted(tmp_path)
    weights, config = _arrays(converted)
    kept = config[0, :, 0] != 2
    _save(tmp_path, weights[:, kept], config[:, kept])
    assert npy.read(tmp_path, BASE).digest == converted.digest


def test_float32_is_rounded_to_the_engine_s_type(tmp_path: Path) -> None:
    weights, config = _arrays(_converted(tmp_path))
    _save(tmp_path, weights.astype(np.float32), config)
    rows = unpack(npy.read(tmp_path, replace(BASE, dtype="bfloat16")), BASE)
    a = rows["attn_q", 0][0]
    np.testing.assert_allclose(a.reshape(-1), weights[0, 0, : a.size], rtol=2**-8)


def _arrays(converted: Converted) -> tuple[Array, Array]:
    weights = np.frombuffer(converted.weights, "<f2").reshape(1, converted.rows, converted.width)
    config = np.frombuffer(converted.config, "<i4").reshape(1, converted.rows, 3)
    return weights.copy(), config.copy()


def _save(
    folder: Path, weights: Any, config: Any, config_name: str = "model.lora_config.npy"
) -> None:
    np.save(folder / "model.lora_weights.npy", weights, allow_pickle=True)
    np.save(folder / config_name, config)


def _set(array: Array, place: tuple[int, ...], value: float) -> Array:
    array[place] = value
    return array


@pytest.mark.parametrize(
    ("weights", "config", "kind", "words"),
    [
        (None, lambda c: _set(c, (0, 0, 0), 0), errors.UnsupportedModule, "attn_qkv"),
        (None, lambda c: _set(c, (0, 0, 0), 99), errors.UnsupportedModule, "module id 99"),
        (None, lambda c: _set(c, (0, 0, 0), -1), errors.UnsupportedModule, "module id -1"),
        (None, lambda c: _set(c, (0, 0, 1), 2), errors.LayerOutOfRange, "0 .. 1"),
        (None, lambda c: _set(c, (0, 0, 1), -1), errors.LayerOutOfRange, "0 .. 1"),
        (None, lambda c: _set(c, (0, 0, 2), 0), errors.InvalidRank, "max_lora_rank"),
        (None, lambda c: _set(c, (0, 0, 2), 9), errors.InvalidRank, "max_lora_rank"),
        (None, lambda c: _set(c, (0, 0, 2), 8), errors.ShapeMismatch, "128 values"),
        (None, lambda c: _set(c, (0, 0, 2), 2), errors.ShapeMismatch, "zeros after 32"),
        (None, lambda c: _set(c, (0, 1, 0), 1), errors.CorruptFile, "two rows"),
        (None, lambda c: c[:, :-1], errors.ShapeMismatch, "one row for each"),
        (None, lambda c: c[:, :0], errors.IncompleteAdapter, "at least one row"),
        (None, lambda c: c.astype(np.int64), errors.UnsupportedFeature, "dtype"),
        (None, lambda c: np.concatenate([c, c[..., :1]], 2), errors.UnsupportedFeature, "DoRA"),
        (None, lambda c: c[0], errors.ShapeMismatch, "[1, rows, 3]"),
        (lambda w: _set(w, (0, 0, 0), np.nan), None, errors.NotFinite, "lora_weights.npy"),
        (lambda w: _set(w, (0, 0, 0), np.inf), None, errors.NotFinite, "lora_weights.npy"),
        (lambda w: w[..., :-1], None, errors.ShapeMismatch, "values"),
        (lambda w: np.pad(w, ((0, 0), (0, 0), (0, 4))), None, errors.ShapeMismatch, "longest row"),
        (lambda w: w[0], None, errors.ShapeMismatch, "[1, 7, width]"),
        (lambda w: w.astype(np.float64), None, errors.UnsupportedFeature, "dtype"),
        (lambda w: w.astype(object), None, errors.UnsupportedFeature, "dtype"),
        (np.asfortranarray, None, errors.UnsupportedFeature, "fortran_order"),
    ],
)
def test_refused(
    tmp_path: Path, weights: Any, config: Any, kind: type[errors.AdapterError], words: str
) -> None:
    w, c = _arrays(_converted(tmp_path))
    _save(tmp_path, weights(w) if weights else w, config(c) if config else c)
    with pytest.raises(kind) as caught:
        npy.read(tmp_path, BASE)
    assert words in str(caught.value)


def test_another_base_model_s_sizes_are_noticed(tmp_path: Path) -> None:
    weights, config = _arrays(_converted(tmp_path))
    _save(tmp_path, weights, config)
    for changes in ({"hidden_size": 16}, {"intermediate_size": 16}, {"intermediate_size": 8}):
        with pytest.raises(errors.ShapeMismatch):
            npy.read(tmp_path, replace(BASE, **changes))


def test_missing_and_oversized_files(tmp_path: Path) -> None:
    weights, config = _arrays(_converted(tmp_path))
    with pytest.raises(errors.MissingFile, match="lora_keys"):
        npy.read(tmp_path, BASE)
    _save(tmp_path, weights, config)
    with pytest.raises(errors.TooLarge):
        npy.read(tmp_path, BASE, max_bytes=100)


def _header(text: bytes, length: int | None = None, version: bytes = b"\x02\x00") -> bytes:
    length = len(text) if length is None else length
    return b"\x93NUMPY" + version + length.to_bytes(4, "little") + text


def _fields(descr: bytes = b"'<i4'", shape: bytes = b"(1, 7, 3)") -> bytes:
    return b"{'descr': " + descr + b", 'fortran_order': False, 'shape': " + shape + b"}"


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\x93NUMPY",
        _header(_fields(), version=b"\x03\x00"),
        _header(b""),
        _header(b"7"),
        _header(b"{[]: 1}"),
        _header(b"  x"),
        _header(b"'\\"),
        _header(b"(" * 9_900),
        _header(b"-" * 9_900 + b"1"),
        _header(_fields(b"[" * 90 + b"]" * 90)),
        _header(_fields(b"'i4" + b",i4" * 3_000 + b"'")),
        _header(_fields(b"'V99999999999999999999'")),
        _header(_fields(b"(('<i4', (999999999, 999999999)))")),
        _header(_fields(b"[('a', '<i2')]")),
        _header(_fields(b"'|O8'") + b"cos\nsystem\n"),
        _header(_fields(shape=b"(-1, 3)")),
        _header(_fields(shape=b"(" + b"1," * 4_000 + b")")),
        _header(_fields(shape=b"(" + b"9" * 4_000 + b"," + b"9" * 4_000 + b")")),
        _header(_fields(shape=b"(7L, 3L)")),
        _header(b"__import__('os').system('true')"),
    ],
)
@pytest.mark.filterwarnings("default")
def test_hostile_headers_cost_little(tmp_path: Path, raw: bytes) -> None:
    npy.write(_converted(tmp_path), tmp_path)
    (tmp_path / "model.lora_config.npy").write_bytes(raw)
    expected = (errors.CorruptFile, errors.UnsupportedFeature)
    with costs_less_than(0.5), pytest.raises(expected) as refused:
        npy.read(tmp_path, BASE)
    assert len(str(refused.value)) < 1000


@pytest.mark.parametrize("length", [2**32 - 1, 40_000_000, 10_001])
def test_a_header_is_not_read_beyond_its_limit(tmp_path: Path, length: int) -> None:
    """Check that a long header is neither copied nor decoded, which would multiply its memory."""
    npy.write(_converted(tmp_path), tmp_path)
    raw = _header(_fields().ljust(40_000_000), length)
    (tmp_path / "model.lora_config.npy").write_bytes(raw)
    tracemalloc.start()
    try:
        with pytest.raises(errors.CorruptFile, match="header"):
            npy.read(tmp_path, BASE)
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert most < len(raw) + 2 * 1024 * 1024


@scale_examples(5)
@given(data=st.data())
def test_any_damage_to_a_header_or_length_is_an_adapter_error_or_harmless(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("npy")
    converted = _converted(folder)
    npy.write(converted, folder)
    name = data.draw(st.sampled_from(["model.lora_weights.npy", "model.lora_config.npy"]))
    raw = bytearray((folder / name).read_bytes())
    if data.draw(st.booleans(), label="cut"):
        raw = raw[: data.draw(st.integers(0, len(raw) - 1))]
    else:
        start = data.draw(st.integers(0, 127))
        raw[start : start + 1] = data.draw(st.binary(min_size=1, max_size=9))
    (folder / name).write_bytes(raw)
    try:
        again = npy.read(folder, BASE)
    except errors.AdapterError:
        return
    assert again.digest == converted.digest

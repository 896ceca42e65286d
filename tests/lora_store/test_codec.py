"""The binary form: nothing that was damaged is ever taken for weights."""

from __future__ import annotations

import hashlib
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapters.adapter import Converted, make_converted
from lora_store.codec import CorruptBlob, decode, encode, encoded_bytes
from tests.support.lora_files import content


@st.composite
def _contents(draw: st.DrawFn) -> Converted:
    dtype = draw(st.sampled_from(["float16", "bfloat16"]))
    rows = draw(st.lists(st.tuples(*[st.integers(-(2**31), 2**31 - 1)] * 3), max_size=400))
    width = draw(st.integers(0, 8))
    size = 2 * len(rows) * width
    weights = draw(st.binary(min_size=size, max_size=size))
    return make_converted(dtype, rows, width, weights)


def _bytes(converted: Converted) -> bytes:
    return b"".join(encode(converted))


@given(_contents())
def test_round_trip(converted: Converted) -> None:
    blob = _bytes(converted)
    assert len(blob) == encoded_bytes(converted)
    again = decode(memoryview(blob), converted.digest)
    assert (again.dtype, again.rows, again.width) == (
        converted.dtype,
        converted.rows,
        converted.width,
    )
    assert again.config == converted.config
    assert bytes(again.weights) == bytes(converted.weights)
    assert again.digest == converted.digest


def test_weights_are_neither_copied_nor_writable_and_start_on_a_page() -> None:
    blob = bytearray(_bytes(content(1)))
    weights = decode(memoryview(blob), content(1).digest).weights
    assert isinstance(weights, memoryview)
    assert weights.readonly
    assert (len(blob) - len(weights)) % 4096 == 0
    blob[-1] ^= 1
    assert weights[-1] == blob[-1]


@given(_contents(), st.data())
def test_every_changed_byte_is_noticed(converted: Converted, data: st.DataObject) -> None:
    blob = bytearray(_bytes(converted))
    place = data.draw(st.integers(0, len(blob) - 1))
    blob[place] ^= data.draw(st.integers(1, 255))
    with pytest.raises(CorruptBlob):
        decode(memoryview(blob), converted.digest)


@given(_contents(), st.data())
def test_every_other_length_is_noticed(converted: Converted, data: st.DataObject) -> None:
    blob = _bytes(converted)
    cut = data.draw(st.integers(0, len(blob) - 1))
    for damaged in (blob[:cut], blob + data.draw(st.binary(min_size=1, max_size=9))):
        with pytest.raises(CorruptBlob):
            decode(memoryview(damaged), converted.digest)
        with pytest.raises(CorruptBlob):
            decode(memoryview(damaged), converted.digest, verify=False)


@given(st.binary(max_size=300))
def test_any_bytes_are_no_adapter(blob: bytes) -> None:
    with pytest.raises(CorruptBlob):
        decode(memoryview(blob), "00" * 32)


def test_another_version_than_the_one_asked_for() -> None:
    with pytest.raises(CorruptBlob, match=content(2).digest[:12]):
        decode(memoryview(_bytes(content(2))), content(1).digest)


def test_form_version_is_checked_before_anything_else_is_read() -> None:
    blob = bytearray(_bytes(content(1)))
    struct.pack_into("<I", blob, 8, 2)

    blob[64:96] = hashlib.sha256(blob[:64]).digest()
    with pytest.raises(CorruptBlob, match="version 1"):
        decode(memoryview(blob), content(1).digest)

"""The binary format of an adapter version: damaged bytes are never accepted as weights."""

from __future__ import annotations

import hashlib
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapters.adapter import Converted, make_converted
from lora_store.codec import (
    HEADER_BYTES,
    CorruptBlob,
    decode,
    encode,
    encoded_bytes,
    read_header,
)
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
    again = decode(blob, converted.digest)
    assert (again.dtype, again.rows, again.width) == (
        converted.dtype,
        converted.rows,
        converted.width,
    )
    assert again.config == converted.config
    assert bytes(again.weights) == bytes(converted.weights)
    assert again.digest == converted.digest


def test_weights_are_the_bytes_that_were_verified_and_not_a_copy() -> None:
    blob = _bytes(content(1))
    weights = decode(blob, content(1).digest).weights
    assert isinstance(weights, memoryview)
    assert weights.readonly
    assert weights.obj is blob


@given(_contents(), st.data())
def test_every_changed_byte_is_noticed(converted: Converted, data: st.DataObject) -> None:
    blob = bytearray(_bytes(converted))
    place = data.draw(st.integers(0, len(blob) - 1))
    blob[place] ^= data.draw(st.integers(1, 255))
    with pytest.raises(CorruptBlob):
        decode(bytes(blob), converted.digest)


@given(_contents(), st.data())
def test_every_other_length_is_noticed(converted: Converted, data: st.DataObject) -> None:
    blob = _bytes(converted)
    cut = data.draw(st.integers(0, len(blob) - 1))
    for damaged in (blob[:cut], blob + data.draw(st.binary(min_size=1, max_size=9))):
        with pytest.raises(CorruptBlob):
            decode(damaged, converted.digest)
        with pytest.raises(CorruptBlob):
            read_header(damaged[:HEADER_BYTES], len(damaged), converted.digest)


@given(st.binary(max_size=300))
def test_any_bytes_are_no_adapter(blob: bytes) -> None:
    with pytest.raises(CorruptBlob):
        decode(blob, "00" * 32)


def test_another_version_than_the_one_asked_for() -> None:
    with pytest.raises(CorruptBlob, match=content(2).digest[:12]):
        decode(_bytes(content(2)), content(1).digest)


@pytest.mark.parametrize(("field", "value"), [(8, 2), (12, 2)], ids=["version", "data type"])
def test_another_form_is_told_by_its_header(field: int, value: int) -> None:
    blob = bytearray(_bytes(content(1)))
    struct.pack_into("<I", blob, field, value)
    blob[64:96] = hashlib.sha256(blob[:64]).digest()
    with pytest.raises(CorruptBlob, match="version 1"):
        decode(bytes(blob), content(1).digest)

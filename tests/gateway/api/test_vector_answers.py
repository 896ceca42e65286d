"""Embeddings in answers: numbers and base64 are equal, and shortened vectors have length 1."""

from __future__ import annotations

import base64
import json

import numpy as np
import numpy.typing as npt
from hypothesis import given
from hypothesis import strategies as st

from gateway.api.vectors.answers import write_embeddings
from gateway.pipeline.mapped_inputs import shape_vectors

NUMBERS = st.floats(width=32, allow_nan=False, allow_infinity=False)


@st.composite
def rows(draw: st.DrawFn) -> npt.NDArray[np.float32]:
    width = draw(st.integers(1, 8))
    each = st.lists(NUMBERS, min_size=width, max_size=width)
    return np.array(draw(st.lists(each, min_size=1, max_size=4)), np.float32)


@given(rows(), st.integers(0, 3000))
def test_both_forms_are_the_models_numbers(found: npt.NDArray[np.float32], first: int) -> None:
    as_numbers = json.loads(b"[" + write_embeddings(found, first, as_base64=False) + b"]")
    as_text = json.loads(b"[" + write_embeddings(found, first, as_base64=True) + b"]")
    for index, (one, other) in enumerate(zip(as_numbers, as_text, strict=True)):
        assert one["index"] == other["index"] == first + index
        exact = found[index].astype("<f4").tobytes()
        assert np.array(one["embedding"], "<f4").tobytes() == exact
        assert base64.b64decode(other["embedding"]) == exact


@given(rows(), st.data())
def test_a_cut_vector_has_its_direction_and_length_1(
    found: npt.NDArray[np.float32], data: st.DataObject
) -> None:
    width = found.shape[1]
    count = data.draw(st.integers(1, width))
    cut = shape_vectors(found, count, normalize=data.draw(st.booleans()) or count == width)
    for row, before in zip(cut.astype(np.float64), found.astype(np.float64), strict=True):
        length = np.linalg.norm(before[:count])
        if length > 1e-30:
            np.testing.assert_allclose(row, before[:count] / length, atol=1e-6)
        else:
            assert np.isfinite(row).all()

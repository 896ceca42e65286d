"""Log probabilities from logits, compared with a simple computation."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from gateway.triton.logits import generated_logprobs, token_logprobs

Rows = npt.NDArray[np.float32]


def _raw(rows: Rows, datatype: str) -> tuple[bytes, Rows]:
    """Return the rows as the engine sends them, and their exact values in float32."""
    if datatype == "FP32":
        return rows.tobytes(), rows
    if datatype == "FP16":
        half = rows.astype(np.float16)
        return half.tobytes(), half.astype(np.float32)
    bits = rows.view(np.uint32) >> 16
    return bits.astype(np.uint16).tobytes(), (bits << 16).view(np.float32)


def _plainly(row: Any, temperature: float = 1.0) -> Any:
    """Return the log probabilities of the entire row in double precision."""
    scaled = row.astype(np.float64) / temperature
    return scaled - np.logaddexp.reduce(scaled)


@pytest.mark.parametrize("datatype", ["FP32", "FP16", "BF16"])
@pytest.mark.parametrize("vocabulary", [3, 20, 256, 8192, 128_256])
@pytest.mark.parametrize("count", [1, 5, 20])
@pytest.mark.parametrize("temperature", [0.0, 1.0, 0.7])
def test_the_likeliest(datatype: str, vocabulary: int, count: int, temperature: float) -> None:
    rows = np.random.default_rng(vocabulary).normal(0, 4, (3, vocabulary)).astype(np.float32)
    raw, exact = _raw(rows, datatype)
    shape = [1, 3, 1, vocabulary]
    found = generated_logprobs(raw, datatype, shape, [1, 2], count, temperature)
    assert len(found) == 2, "of so many as there are new tokens"
    for row, entry in zip(exact, found, strict=False):
        values, best = _plainly(row, temperature or 1.0), entry.top
        assert entry.logprob == pytest.approx(values[entry.token_id], abs=1e-5)
        assert entry.logprob == dict(best).get(entry.token_id, entry.logprob)
        # The first of equal logits counts. FP16 and BF16 rows have many equal logits.
        expected = np.argsort(-row, kind="stable")[:count]
        assert [token_id for token_id, _ in best] == expected.tolist()
        assert [value for _, value in best] == pytest.approx(values[expected], abs=1e-5)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([0.0] * 1000, [0, 1, 2]),
        ([-np.inf] * 998 + [1.0, 2.0], [999, 998, 0]),
        ([5.0, *[0.0] * 998, 5.0], [0, 999, 1]),
        ([*[0.0] * 400, 7.0, 8.0, 9.0, *[0.0] * 597], [402, 401, 400]),
    ],
    ids=["equal", "forbidden", "both ends", "in one block"],
)
def test_the_likeliest_of_odd_rows(values: list[float], expected: list[int]) -> None:
    raw = np.array(values, np.float32).tobytes()
    [entry] = generated_logprobs(raw, "FP32", [1, 1, 1, 1000], [0], 3, 1.0)
    assert [token_id for token_id, _ in entry.top] == expected


@pytest.mark.parametrize("count", [0, 2])
def test_each_token_of_a_prompt_is_scored_by_the_logits_before_it(count: int) -> None:
    rows = np.random.default_rng(1).normal(0, 4, (3, 1000)).astype(np.float32)
    ids = [8, 999]
    entries = token_logprobs(rows.tobytes(), "FP32", 1000, ids, count)
    assert [entry.token_id for entry in entries] == ids
    for row, entry in zip(rows, entries, strict=False):
        values = _plainly(row)
        assert entry.logprob == pytest.approx(values[entry.token_id], abs=1e-5)
        best = np.argsort(-row)[:count]
        assert [token_id for token_id, _ in entry.top] == best.tolist()
        assert entry.rank == np.argsort(-row).tolist().index(entry.token_id) + 1


def test_what_cannot_be_has_a_log_probability_that_json_can_hold() -> None:
    """Logits of minus infinity, made by a guide or bad words, give -9999.0, as OpenAI does."""
    row = np.array([-np.inf, *[0.0] * 998, -np.inf], np.float32).tobytes()
    [warm] = generated_logprobs(row, "FP32", [1, 1, 1, 1000], [0], 1000, 1.0)
    assert warm.top[-2:] == ((0, -9999.0), (999, -9999.0))
    [cold] = generated_logprobs(row, "FP32", [1, 1, 1, 1000], [0], 1000, 0.5)
    assert cold.top[-2:] == warm.top[-2:]
    [entry] = token_logprobs(row, "FP32", 1000, [999], 1000)
    assert (entry.logprob, entry.top[-1]) == (-9999.0, (999, -9999.0))
    likely = np.array([0.0, *[-60_000.0] * 999], np.float32).tobytes()
    [entry] = generated_logprobs(likely, "FP32", [1, 1, 1, 1000], [1], 2, 1.0)
    assert (entry.logprob, entry.top) == (-9999.0, ((0, 0.0), (1, -9999.0)))

"""The sampling pipeline, compared with direct formulas on random inputs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.executor_client import request
from triton_repo.cpu_executor.sampling import (
    LOWEST,
    SamplingRow,
    SamplingState,
    choose,
    draw,
    process,
    truncate,
)
from triton_repo.cpu_executor.words import BadWords, StopWords, list_repeating

VOCAB = 70


def processed(logits: np.ndarray, generated: list[int], **more: Any) -> np.ndarray:
    asked = request([1, 2, 2, 3], 9, **more)
    line = logits.astype(np.float32).copy()[None]
    state = SamplingState(asked, 0, len(logits))
    for token in generated:
        state.accept(token)
    process(line, [SamplingRow(state, asked.input_token_ids, generated)])
    return line[0]


LOGITS = np.linspace(-3, 3, VOCAB).astype(np.float32)


def test_temperature_comes_before_the_penalties_which_count_the_prompt() -> None:
    line = processed(
        LOGITS,
        [2, 60],
        temperature=0.5,
        repetition_penalty=2.0,
        presence_penalty=0.25,
        frequency_penalty=0.125,
    )
    expected = LOGITS / np.float32(0.5 + 1e-6)
    for token, count in ((1, 1), (2, 3), (3, 1), (60, 1)):
        value = expected[token]
        value = value * 2 if value < 0 else value / 2
        expected[token] = value - 0.25 - 0.125 * count
    np.testing.assert_allclose(line, expected, rtol=1e-6)


def test_bias_is_scaled_by_the_temperature() -> None:
    line = processed(LOGITS, [], temperature=0.5, embedding_bias=np.ones(VOCAB))
    np.testing.assert_allclose(line, (LOGITS + 1) * 2, rtol=1e-5)


def test_min_length_masks_the_end_until_enough_is_generated() -> None:
    assert processed(LOGITS, [5], end_id=9, min_length=2)[9] == LOWEST
    assert processed(LOGITS, [5, 6], end_id=9, min_length=2)[9] == LOGITS[9]


def test_bans() -> None:
    line = processed(LOGITS, [4], bad_words=[[8], [4, 7], [5, 6], [3, 4, 9], [500]])
    assert sorted(np.flatnonzero(line == LOWEST)) == [7, 8, 9]
    line = processed(LOGITS, [9, 1, 2], no_repeat_ngram_size=3)
    assert np.flatnonzero(line == LOWEST).tolist() == [2]


def test_nothing_given_is_greedy_and_so_is_temperature_zero() -> None:
    rows = np.random.default_rng(0).standard_normal((4, VOCAB)).astype(np.float32)
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 0.0, "top_p": 0.9},
        {"top_k": 1},
        {"temperature": 0.0, "top_k": 5},
    ]
    states = [SamplingState(request([1], 1, **kind), 0, VOCAB) for kind in kinds]
    tokens, log_probs = choose(rows, states, True)
    assert tokens == rows.argmax(axis=1).tolist()
    assert log_probs == [0.0] * 4


def naive_candidates(weights: np.ndarray, top_k: int, top_p: float) -> set[int]:
    order = sorted(range(len(weights)), key=lambda i: (-weights[i], i))
    order = order[: top_k or len(order)]
    total = sum(float(weights[i]) for i in order)
    kept: set[int] = set()
    mass = 0.0
    for i in order:
        kept.add(i)
        mass += float(weights[i])
        if top_p < 1 and mass >= top_p * total:
            break
    return kept


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(1, 40), min_size=2, max_size=VOCAB),
    st.integers(0, VOCAB),
    st.sampled_from([0.05, 0.3, 0.51, 0.77, 0.95, 1.0]),
)
def test_truncate_keeps_the_right_candidates(values: list[int], top_k: int, top_p: float) -> None:
    # Small integers give many ties and no rounding errors.
    weights = np.array([values, values[::-1]], np.float32)
    kept = weights.copy()
    truncate(kept, np.array([top_k, 0]), np.array([top_p, 1.0]))
    assert set(np.flatnonzero(kept[0]).tolist()) == naive_candidates(weights[0], top_k, top_p)
    assert np.array_equal(kept[1], weights[1])
    chosen = kept[0] > 0
    assert np.array_equal(kept[0][chosen], weights[0][chosen])


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.floats(0, 1e6, width=32), min_size=1, max_size=200).filter(any),
    st.floats(0, 1, exclude_max=True),
)
def test_draw_inverts_the_distribution_function(values: list[float], uniform: float) -> None:
    weights = np.array([values], np.float32)
    (token,) = draw(weights, np.array([uniform])).tolist()
    assert weights[0, token] > 0
    ends = np.cumsum(weights[0], dtype=np.float64) / weights.sum(dtype=np.float64)
    start = ends[token - 1] if token else 0.0
    assert start - 1e-6 <= uniform <= ends[token] + 1e-6


def test_draws_follow_the_weights() -> None:
    weights = np.repeat(np.arange(100, dtype=np.float32)[None], 50_000, axis=0)
    tokens = draw(weights, np.random.default_rng(0).random(50_000))
    share = np.bincount(tokens, minlength=100) / 50_000
    np.testing.assert_allclose(share, weights[0] / weights[0].sum(), atol=3e-3)


def test_a_row_does_not_depend_on_the_others() -> None:
    random = np.random.default_rng(1)
    rows = random.standard_normal((9, 4096)).astype(np.float32) * 3
    kinds: list[dict[str, Any]] = [{}, {"top_p": 0.8}, {"top_k": 40}, {"temperature": 0.7}] * 2
    kinds.append({"top_k": 9, "top_p": 0.5})

    def states() -> list[SamplingState]:
        made = []
        for seed, kind in enumerate(kinds):
            asked = request([1], 1, **{"top_p": 1.0, **kind}, seed=seed, return_log_probs=True)
            made.append(SamplingState(asked, 0, 4096))
        return made

    together = choose(rows, states(), True)
    alone = [choose(rows[i : i + 1], [state], True) for i, state in enumerate(states())]
    assert together[0] == [tokens[0] for tokens, _ in alone]
    assert together[1] == [log_probs[0] for _, log_probs in alone]


@pytest.mark.parametrize(("normalise", "size"), [(True, 5), (False, VOCAB)])
def test_log_probs_of_the_top_k_path(normalise: bool, size: int) -> None:
    state = SamplingState(request([1], 1, top_k=5, return_log_probs=True), 0, VOCAB)
    (token,), (log_prob,) = choose(LOGITS[None].copy(), [state], normalise)
    best = LOGITS[-size:].astype(np.float64)
    assert token >= VOCAB - 5
    assert log_prob == pytest.approx(LOGITS[token] - np.log(np.exp(best).sum()), abs=1e-5)


def test_top_p_decays_and_resets() -> None:
    asked = request([1], 9, top_p=0.8, top_p_decay=0.5, top_p_min=0.3, top_p_reset_ids=7)
    state = SamplingState(asked, 0, VOCAB)
    seen = [state.top_p]
    for token in (1, 2, 7, 3):
        state.accept(token)
        seen.append(state.top_p)
    np.testing.assert_allclose(seen, [0.8, 0.4, 0.3, 0.8, 0.4], rtol=1e-6)


IDS = st.lists(st.integers(0, 3), max_size=8)


@given(st.lists(IDS, max_size=4), IDS.filter(bool))
def test_stop_words_are_a_suffix_match(words: list[list[int]], generated: list[int]) -> None:
    expected = any(word and generated[-len(word) :] == word for word in words)
    assert StopWords(words).match(generated) == expected


@given(st.lists(IDS, max_size=4), IDS)
def test_bad_words_ban_what_would_complete_one(words: list[list[int]], ids: list[int]) -> None:
    banned = set(BadWords(words).list_banned(ids))
    for token in range(4):
        completes = any(word and [*ids, token][-len(word) :] == word for word in words)
        assert (token in banned) == completes


@given(IDS, st.integers(1, 4))
def test_repeating_ngrams(ids: list[int], size: int) -> None:
    grams = [tuple(ids[i : i + size]) for i in range(len(ids) - size + 1)]
    banned = set(list_repeating(ids, size))
    for token in range(4):
        new = tuple([*ids, token][-size:])
        assert (token in banned) == (len(new) == size and new in grams)

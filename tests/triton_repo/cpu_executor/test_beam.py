"""Beam search, compared with a naive implementation over complete forward passes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.support.executor_client import (
    GOLDEN,
    golden_greedy,
    golden_prompt,
    request,
    run,
    start_golden,
)
from triton_repo.cpu_executor import bindings as trtllm
from triton_repo.cpu_executor.active import ActiveRequest
from triton_repo.cpu_executor.beam import log_softmax
from triton_repo.cpu_executor.causal_lm import Chunk
from triton_repo.cpu_executor.decoder import SequenceDecoder
from triton_repo.cpu_executor.engine import load_config
from triton_repo.cpu_executor.kv_cache import SequenceCache
from triton_repo.cpu_executor.llama import Llama
from triton_repo.cpu_executor.mailbox import Queued

PROMPT = golden_prompt()[:40]


@pytest.fixture(scope="module")
def executor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[trtllm.Executor]:
    with start_golden(tmp_path_factory.mktemp("beam")) as executor:
        yield executor


class Naive:
    """A reference that runs each hypothesis through the model from its first token."""

    def __init__(self) -> None:
        self.config = load_config(GOLDEN / "gqa")
        self.model = Llama(self.config, GOLDEN / "gqa")

    def log_probs(self, ids: list[int]) -> np.ndarray:
        cache = SequenceCache(self.config, len(ids))
        return log_softmax(self.model.forward([Chunk(cache, ids)]))[0]

    def search(
        self, width: int, length: int, end_id: int = -1, penalty: float = 0.0
    ) -> list[tuple[list[int], float]]:
        live: list[tuple[list[int], float]] = [([], 0.0)]
        finished: list[tuple[list[int], float]] = []
        while True:
            options = []
            for tokens, total in live:
                scores = self.log_probs(PROMPT + tokens)
                options += [(total + s, tokens, t) for t, s in enumerate(scores.tolist())]
            options.sort(key=lambda option: -option[0])
            live = []
            for rank, (score, tokens, token) in enumerate(options[: 2 * width]):
                ended = [*tokens] if token == end_id else [*tokens, token]
                if token == end_id or len(ended) == length:
                    if rank < width:
                        finished.append((ended, score / max(len(ended), 1) ** penalty))
                elif len(live) < width:
                    live.append((ended, score))
            finished.sort(key=lambda f: -f[1])
            if len(finished) >= width or not live:
                return finished[:width]


@pytest.mark.parametrize(("width", "penalty"), [(2, 0.0), (3, 1.0), (4, 0.5)])
def test_beams_equal_the_naive_search(
    executor: trtllm.Executor, width: int, penalty: float
) -> None:
    naive = Naive()
    best_path = naive.search(width, 6)[0][0]
    # Three end ids: none, one on the best path, and one whose candidate just misses the beam.
    just_too_bad = int(np.argsort(-naive.log_probs(PROMPT))[width])
    for end in (-1, best_path[3], just_too_bad):
        asked = request(
            PROMPT,
            6,
            streaming=False,
            exclude_input_from_output=True,
            beam_width=width,
            length_penalty=penalty,
            end_id=end,
            return_log_probs=True,
        )
        (output,) = run(executor, asked)
        expected = naive.search(width, 6, end, penalty)
        assert output.last.output_token_ids == [tokens for tokens, _ in expected]
        assert output.last.log_probs is not None
        assert len({len(row) for row in output.last.log_probs}) == 1


def test_num_return_sequences_shows_the_best_beams(executor: trtllm.Executor) -> None:
    def beams(**more: Any) -> list[list[int]]:
        asked = request(PROMPT, 6, streaming=False, beam_width=3, **more)
        return run(executor, asked)[0].last.output_token_ids

    assert beams(num_return_sequences=1) == beams()[:1]
    assert beams(num_return_sequences=2) == beams()[:2]


def test_streamed_beams_show_all_ids_so_far(executor: trtllm.Executor) -> None:
    (output,) = run(executor, request(PROMPT, 5, beam_width=2, return_generation_logits=True))
    lengths = [[len(beam) for beam in r.output_token_ids] for r in output.results]
    assert lengths == [[i, i] for i in range(1, 6)]
    assert [r.is_final for r in output.results] == [False] * 4 + [True]
    assert all(r.generation_logits is None for r in output.results)
    (whole,) = run(executor, request(PROMPT, 5, beam_width=2, streaming=False))
    assert output.last.output_token_ids == [b[40:] for b in whole.last.output_token_ids]


def test_generation_logits_of_beams(executor: trtllm.Executor) -> None:
    asked = request(
        PROMPT,
        4,
        beam_width=2,
        streaming=False,
        return_generation_logits=True,
        exclude_input_from_output=True,
    )
    (output,) = run(executor, asked)
    logits = output.last.generation_logits
    assert logits is not None
    assert logits.shape == (2, 4, 160)
    naive = Naive()
    for beam, rows in zip(output.last.output_token_ids, logits, strict=True):
        for i in range(4):
            expected = naive.log_probs(PROMPT + beam[:i])
            np.testing.assert_allclose(log_softmax(rows[i : i + 1])[0], expected, atol=1e-4)


def test_diversity_changes_the_beams(executor: trtllm.Executor) -> None:
    plain, diverse = (
        run(executor, request(PROMPT, 6, beam_width=4, beam_search_diversity_rate=rate))[0]
        for rate in (0.0, 3.0)
    )
    assert plain.last.output_token_ids != diverse.last.output_token_ids


def test_stop_words_end_beams(executor: trtllm.Executor) -> None:
    best = run(executor, request(PROMPT, 8, beam_width=2))[0].last.output_token_ids[0]
    (output,) = run(executor, request(PROMPT, 8, beam_width=2, stop_words=[best[2:4]]))
    assert best[:4] in output.last.output_token_ids
    index = output.last.output_token_ids.index(best[:4])
    assert output.last.finish_reasons[index] == trtllm.FinishReason.STOP_WORDS


@pytest.mark.parametrize("early_stopping", [0, 1, 2])
def test_early_stopping_modes_find_good_beams(
    executor: trtllm.Executor, early_stopping: int
) -> None:
    end_id = golden_greedy()[0]
    asked = request(
        PROMPT, 12, beam_width=3, end_id=end_id, early_stopping=early_stopping, streaming=False
    )
    (output,) = run(executor, asked)
    assert len(output.last.output_token_ids) == 3
    assert output.last.cum_log_probs is None
    assert all(end_id not in beam[40:] for beam in output.last.output_token_ids)


def test_cancelled_beams(executor: trtllm.Executor) -> None:
    request_id = executor.enqueue_request(request(PROMPT, 400, beam_width=3))
    executor.cancel_request(request_id)
    results = []
    while not results or not results[-1].is_final:
        results += [r.result for r in executor.await_responses(request_id, 10.0)]
    assert results[-1].output_token_ids == [[], [], []]
    assert results[-1].finish_reasons == [trtllm.FinishReason.CANCELLED] * 3


def test_requests_of_another_beam_width_wait(executor: trtllm.Executor) -> None:
    mixed = [request(PROMPT, 6, beam_width=w) for w in (1, 3, 1, 2)]
    alone = [run(executor, one)[0].last.output_token_ids for one in mixed]
    executor.get_latest_iteration_stats()
    together = [output.last.output_token_ids for output in run(executor, *mixed)]
    assert together == alone
    stats = executor.get_latest_iteration_stats()
    assert max(s.inflight_batching_stats.num_scheduled_requests for s in stats) == 1


def test_only_the_best_candidates_may_end() -> None:
    asked = request([1], 9, beam_width=2, end_id=0)
    active = ActiveRequest(Queued(1, asked, 1), 9)
    config = load_config(GOLDEN / "gqa")
    SequenceDecoder(160, normalize_log_probs=True).prepare(active)
    for sequence, score in zip(active.sequences, (-1.0, -2.0), strict=True):
        sequence.append(5, score)
        sequence.cache = SequenceCache(config, 1)
    logits = np.full((2, 160), -50, np.float32)
    logits[0, [0, 7]] = [1.0, 0.9]
    logits[1, [0, 8]] = [1.0, 0.9]
    assert active.beams is not None
    active.beams.step(active.sequences, logits)
    # Order by score: end and 7 after the first beam, end and 8 after the second.
    assert [s.tokens for s in active.sequences] == [[5, 7], [5, 8]]
    logits = np.full((2, 160), -50, np.float32)
    logits[0, 0] = logits[1, 9] = 1.0
    active.beams.step(active.sequences, logits)
    # Two ended beams finish the search, one from each step. In the first step, the second beam's
    # end was only the third candidate and did not count.
    assert [s.tokens for s in active.sequences] == [[5], [5, 7]]


def test_penalties_follow_their_beam(executor: trtllm.Executor) -> None:
    asked = request(PROMPT, 10, beam_width=3, no_repeat_ngram_size=1, presence_penalty=5.0)
    (output,) = run(executor, asked)
    for beam in output.last.output_token_ids:
        assert len(set(beam)) == len(beam)
        assert not set(beam) & set(PROMPT)
    assert all(a != b for a, b in itertools.combinations(output.last.output_token_ids, 2))

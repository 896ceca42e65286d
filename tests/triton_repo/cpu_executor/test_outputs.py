"""Outputs of a request: token ids, streaming, finish reasons, log probabilities and logits."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.executor_client import (
    golden,
    golden_greedy,
    golden_prompt,
    request,
    run,
)
from triton_repo.cpu_executor import bindings as trtllm
from triton_repo.cpu_executor.bindings import FinishReason

PROMPT = golden_prompt()
GREEDY = golden_greedy()


def test_streaming_sends_one_new_id_per_response(executor: trtllm.Executor) -> None:
    (output,) = run(executor, request(PROMPT, 12))
    assert [r.output_token_ids for r in output.results] == [[[t]] for t in GREEDY[:12]]
    assert [r.is_final for r in output.results] == [False] * 11 + [True]
    reasons = [r.finish_reasons[0] for r in output.results]
    assert reasons == [FinishReason.NOT_FINISHED] * 11 + [FinishReason.LENGTH]
    assert [r.decoding_iter for r in output.results] == list(range(1, 13))


def test_all_generated_ids_on_request(executor: trtllm.Executor) -> None:
    (output,) = run(executor, request(PROMPT, 4, return_all_generated_tokens=True))
    assert [r.output_token_ids[0] for r in output.results] == [GREEDY[:i] for i in range(1, 5)]


@pytest.mark.parametrize("exclude", [False, True])
def test_non_streaming_sends_one_response(executor: trtllm.Executor, exclude: bool) -> None:
    asked = request(PROMPT, 12, streaming=None, exclude_input_from_output=exclude)
    (output,) = run(executor, asked)
    (result,) = output.results
    assert result.output_token_ids == [([] if exclude else PROMPT) + GREEDY[:12]]
    assert result.is_final
    assert result.is_sequence_final


def test_end_id_is_not_sent_and_makes_an_extra_empty_response(executor: trtllm.Executor) -> None:
    (output,) = run(executor, request(PROMPT, 48, end_id=GREEDY[10]))
    assert output.tokens() == GREEDY[:10]
    assert output.last.output_token_ids == [[]]
    assert output.last.finish_reasons == [FinishReason.END_ID]
    assert len(output.results) == 11


def test_end_id_first_gives_only_the_empty_response(executor: trtllm.Executor) -> None:
    (output,) = run(executor, request(PROMPT, 48, end_id=GREEDY[0]))
    assert [r.output_token_ids for r in output.results] == [[[]]]
    (whole,) = run(executor, request(PROMPT, 48, end_id=GREEDY[0], streaming=False))
    assert whole.last.output_token_ids == [PROMPT]


def test_stop_words_end_with_their_ids_in_the_output(executor: trtllm.Executor) -> None:
    words = [[GREEDY[3], 0], GREEDY[5:8]]
    (output,) = run(executor, request(PROMPT, 48, stop_words=words))
    assert output.tokens() == GREEDY[:8]
    assert output.last.output_token_ids == [[GREEDY[7]]]
    assert output.last.finish_reasons == [FinishReason.STOP_WORDS]


def test_bad_words_are_avoided(executor: trtllm.Executor) -> None:
    bad = [[GREEDY[0]], GREEDY[4:6]]
    (output,) = run(executor, request(PROMPT, 20, bad_words=bad))
    tokens = output.tokens()
    assert GREEDY[0] not in tokens
    assert all(tokens[i : i + 2] != GREEDY[4:6] for i in range(19))


def test_max_tokens_is_cut_to_the_engines_length(executor: trtllm.Executor) -> None:
    (output,) = run(executor, request(PROMPT * 3, 500))
    assert len(output.tokens()) == 512 - len(PROMPT) * 3
    assert output.last.finish_reasons == [FinishReason.LENGTH]


def test_mixed_batch_equals_each_request_alone(executor: trtllm.Executor) -> None:
    def requests() -> list[trtllm.Request]:
        made = []
        for i in range(24):
            prompt = PROMPT[i : i + 3 + (i * 11) % 120]
            if i % 3 == 0:
                made.append(request(prompt, 20, top_p=0.9, temperature=0.8, seed=i))
            elif i % 3 == 1:
                made.append(request(prompt, 5 + i, repetition_penalty=1.3))
            else:
                made.append(request(prompt, 9 + i, streaming=False))
        return made

    together = [output.tokens() for output in run(executor, *requests())]
    alone = [run(executor, one)[0].tokens() for one in requests()]
    assert together == alone


def test_embedding_bias_forces_an_id(executor: trtllm.Executor) -> None:
    bias = np.zeros(160)
    bias[77] = 1e4
    (output,) = run(executor, request(PROMPT, 3, embedding_bias=bias))
    assert output.tokens() == [77, 77, 77]


def test_penalties_count_generated_ids(executor: trtllm.Executor) -> None:
    for more in ({}, {"top_p": 1.0}):
        (output,) = run(executor, request(PROMPT[:10], 60, frequency_penalty=200.0, **more))
        assert len(set(output.tokens()) | set(PROMPT[:10])) == 60 + len(set(PROMPT[:10]))


def test_min_length_holds_back_the_end(executor: trtllm.Executor) -> None:
    (output,) = run(executor, request(PROMPT, 20, end_id=GREEDY[2], min_length=9))
    assert len(output.tokens()) >= 9
    assert GREEDY[2] not in output.tokens()[:9]


def test_seed_makes_sampling_repeatable(executor: trtllm.Executor) -> None:
    def sample(seed: int) -> list[int]:
        return run(executor, request(PROMPT, 20, top_p=1.0, random_seed=seed))[0].tokens()

    assert sample(1) == sample(1)
    assert sample(1) != sample(2)


def test_samples_share_id_and_have_own_seeds(executor: trtllm.Executor) -> None:
    several = request(PROMPT, 15, top_p=1.0, seed=5, num_return_sequences=3)
    (output,) = run(executor, several)
    for index in range(3):
        (alone,) = run(executor, request(PROMPT, 15, top_p=1.0, seed=5 + index))
        assert output.tokens(index) == alone.tokens()
    assert [r.is_final for r in output.results].count(True) == 1
    assert sum(r.is_sequence_final for r in output.results) == 3


def test_context_logits_come_with_every_response(executor: trtllm.Executor) -> None:
    (output,) = run(executor, request(PROMPT, 3, return_context_logits=True))
    expected = golden("gqa")["logits"]
    for result in output.results:
        assert result.context_logits is not None
        assert result.context_logits.shape == (150, 160)
        assert result.context_logits.dtype == np.float32
        np.testing.assert_allclose(result.context_logits[::10], expected, rtol=1e-4, atol=1e-4)


def test_generation_logits(executor: trtllm.Executor) -> None:
    (stream,) = run(executor, request(PROMPT, 4, return_generation_logits=True))
    parts = [r.generation_logits for r in stream.results]
    assert all(part is not None and part.shape == (1, 1, 160) for part in parts)
    asked = request(
        PROMPT, 4, return_generation_logits=True, streaming=False, stop_words=[GREEDY[:2]]
    )
    (whole,) = run(executor, asked)
    logits = whole.last.generation_logits
    assert logits is not None
    assert logits.shape == (1, 4, 160)
    assert logits[0, :2].argmax(axis=1).tolist() == GREEDY[:2]
    assert not logits[0, 2:].any()
    np.testing.assert_array_equal(logits[0, 0], parts[0][0, 0])


def test_log_probs_grow_and_are_zero_for_greedy(executor: trtllm.Executor) -> None:
    (output,) = run(executor, request(PROMPT, 3, return_log_probs=True))
    assert [r.log_probs for r in output.results] == [[[0.0] * i] for i in (1, 2, 3)]
    assert output.last.cum_log_probs == [0.0]


def test_log_probs_of_the_whole_vocabulary(executor: trtllm.Executor) -> None:
    asked = request(PROMPT, 1, top_p=1.0, return_log_probs=True, return_generation_logits=True)
    (output,) = run(executor, asked)
    logits = output.last.generation_logits
    assert logits is not None
    assert output.last.log_probs is not None
    line = logits[0, 0].astype(np.float64)
    expected = line - np.log(np.exp(line).sum())
    assert output.last.log_probs[0][0] == pytest.approx(expected[output.tokens()[0]], abs=1e-5)

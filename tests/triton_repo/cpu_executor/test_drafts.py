"""Draft tokens from a client (speculative decoding with a draft model) and prompt tables."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from tests.support.executor_client import (
    GOLDEN,
    Output,
    golden_greedy,
    golden_prompt,
    request,
    run,
    start_golden,
)
from triton_repo.cpu_executor import bindings as trtllm
from triton_repo.cpu_executor.weights import load_float32

PROMPT = golden_prompt()
GREEDY = golden_greedy()
WRONG = (GREEDY[2] + 1) % 160
MAX_BATCH_SIZE = 4
ROWS = 8
VOCABULARY = 160


@pytest.fixture(scope="module")
def executor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[trtllm.Executor]:
    limits = {
        "max_draft_len": 4,
        "max_batch_size": MAX_BATCH_SIZE,
        "max_prompt_embedding_table_size": ROWS * MAX_BATCH_SIZE,
    }
    with start_golden(tmp_path_factory.mktemp("drafts"), limits=limits) as executor:
        yield executor


def drafted(executor: trtllm.Executor, tokens: list[int], **more: object) -> Output:
    draft = trtllm.ExternalDraftTokensConfig(tokens)
    asked = request(
        *(PROMPT, 8), external_draft_tokens_config=draft, return_perf_metrics=True, **more
    )
    (output,) = run(executor, asked)
    assert output.error is None
    return output


@pytest.mark.parametrize(
    ("draft", "accepted"),
    [
        (GREEDY[:4], 4),
        ([*GREEDY[:2], WRONG, GREEDY[3]], 2),
        ([WRONG], 0),
    ],
)
def test_accepted_tokens_come_together_with_the_one_behind_them(
    executor: trtllm.Executor, draft: list[int], accepted: int
) -> None:
    output = drafted(executor, draft)
    sizes = [len(result.output_token_ids[0]) for result in output.results]
    assert sizes == [accepted + 1] + [1] * (8 - accepted - 1)
    assert output.tokens() == GREEDY[:8]
    assert output.last.decoding_iter == 8 - accepted
    metrics = output.last.request_perf_metrics
    assert metrics is not None
    found = metrics.speculative_decoding
    assert found.total_draft_tokens == len(draft)
    assert found.total_accepted_draft_tokens == accepted
    assert found.acceptance_rate == accepted / len(draft)


def test_drafts_end_where_the_answer_ends(executor: trtllm.Executor) -> None:
    end = next(i for i in range(1, 4) if GREEDY[i] not in GREEDY[:i])
    output = drafted(executor, GREEDY[:4], end_id=GREEDY[end])
    assert [result.output_token_ids[0] for result in output.results] == [GREEDY[:end]]
    assert output.last.is_final
    (whole,) = drafted(executor, GREEDY[:4], streaming=False).results
    assert whole.output_token_ids == [PROMPT + GREEDY[:8]]


def test_room_is_left_for_the_draft_tokens_of_a_step(executor: trtllm.Executor) -> None:
    (output,) = run(executor, request([5] * 500, 100))
    assert len(output.tokens()) == 512 - 500 - 4


@pytest.mark.parametrize(
    ("draft", "more", "text"),
    [
        (
            trtllm.ExternalDraftTokensConfig([5] * 5),
            {},
            "Draft tokens length (5) exceeds maximum draft tokens length (4).",
        ),
        (
            trtllm.ExternalDraftTokensConfig([5], logits=np.zeros((1, 160), np.float32)),
            {},
            "draft logits are not supported by the CPU executor",
        ),
        (
            trtllm.ExternalDraftTokensConfig([5]),
            {"beam_width": 2},
            "draft tokens with beam search are not supported by the CPU executor",
        ),
    ],
)
def test_drafts_that_do_not_fit_are_refused(
    executor: trtllm.Executor,
    draft: trtllm.ExternalDraftTokensConfig,
    more: dict[str, object],
    text: str,
) -> None:
    (output,) = run(executor, request(PROMPT, 8, external_draft_tokens_config=draft, **more))
    assert output.error is not None
    assert text in output.error


def table(rows: list[int], extra: int = 7) -> trtllm.PromptTuningConfig:
    """Return the embeddings of `rows`, for a prompt that begins with these token ids."""
    embedding = load_float32(GOLDEN / "gqa")["model.embed_tokens.weight"]
    extra_ids = [extra] * len(rows) + [0] * (len(PROMPT) - len(rows))
    return trtllm.PromptTuningConfig(embedding[rows].astype(np.float16), extra_ids)


def test_a_prompt_table_stands_for_ids_behind_the_vocabulary(executor: trtllm.Executor) -> None:
    virtual = [*range(VOCABULARY, VOCABULARY + ROWS), *PROMPT[ROWS:]]
    other = [(token + 1) % VOCABULARY for token in PROMPT[:ROWS]]
    same, first, again = run(
        executor,
        request(virtual, 8, prompt_tuning_config=table(PROMPT[:ROWS])),
        request(virtual, 8, prompt_tuning_config=table(other, extra=8)),
        request([*other, *PROMPT[ROWS:]], 8),
    )
    assert same.tokens() == GREEDY[:8]
    assert first.tokens() == again.tokens() != GREEDY[:8]


def test_blocks_are_reused_under_the_same_extra_ids_alone(executor: trtllm.Executor) -> None:
    virtual = [*range(VOCABULARY, VOCABULARY + ROWS), *PROMPT[ROWS:]]
    reused = []
    for extra in (20, 20, 21):
        tuned = table(PROMPT[:ROWS], extra)
        (output,) = run(
            executor, request(virtual, 2, prompt_tuning_config=tuned, return_perf_metrics=True)
        )
        metrics = output.last.request_perf_metrics
        assert metrics is not None
        reused.append(metrics.kv_cache_metrics.num_reused_blocks)
    assert reused[0] == reused[2] == 0 < reused[1]


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (
            trtllm.PromptTuningConfig(np.zeros((2, 64), np.float16)),
            "Input token extra ids must be provided when enabling kv cache reuse with prompt table",
        ),
        (
            trtllm.PromptTuningConfig(np.zeros((2, 64), np.float16), [1]),
            f"inputTokenExtraIds vector size (1) must be the same as input token vector size "
            f"({len(PROMPT)}).",
        ),
        (
            trtllm.PromptTuningConfig(np.zeros((9, 64), np.float16), [1] * len(PROMPT)),
            "Prompt vocab size9 is larger than max prompt vocab size of 8. Max prompt vocab size "
            "is computed from max_prompt_embedding_table_size / max_batch_size.",
        ),
        (
            trtllm.PromptTuningConfig(np.zeros((2, 64), np.float32), [1] * len(PROMPT)),
            "Request embedding table data type doesn't match model weight data type.",
        ),
        (
            trtllm.PromptTuningConfig(np.zeros((2, 3), np.float16), [1] * len(PROMPT)),
            "the prompt table is 3 wide, the model ",
        ),
    ],
)
def test_tables_that_do_not_fit_are_refused(
    executor: trtllm.Executor, config: trtllm.PromptTuningConfig, text: str
) -> None:
    (output,) = run(executor, request(PROMPT, 8, prompt_tuning_config=config))
    assert output.error is not None
    assert text in output.error

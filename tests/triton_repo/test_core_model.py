"""The core model in a real tritonserver: token ids, stop, cancellation, limits, metrics."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from statistics import median
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from tests.support.triton_server import (
    LONG_ANSWER,
    LONG_SEQ_LEN,
    MODEL,
    Server,
    as_tensor,
    core_inputs,
    error_of,
    long_model,
    new_ids,
    running,
    stop_inputs,
    text_inputs,
)
from triton_repo.cpu_executor import engine

SLOTS = 4
QUEUE = 2
LONG = LONG_ANSWER
# Limit for the tokens of a cancelled request: half a second on an idle machine.
SOON = 475

FAMILIES = {
    "nv_trt_llm_request_metrics": ("request_type", ["active", "max", "scheduled", "context"]),
    "nv_trt_llm_runtime_memory_metrics": ("memory_type", ["cpu", "gpu", "pinned"]),
    "nv_trt_llm_kv_cache_block_metrics": (
        "kv_cache_block_type",
        ["max", "free", "used", "tokens_per", "reused"],
    ),
    "nv_trt_llm_inflight_batcher_metrics": (
        "inflight_batcher_specific_metric",
        ["total_context_tokens", "generation_requests", "micro_batch_id", "paused_requests"],
    ),
    "nv_trt_llm_general_metrics": ("general_type", ["timestamp", "iteration_counter"]),
}


@pytest.fixture(scope="module")
def triton(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("core")
    engine.build(
        long_model(folder),
        folder / "engine",
        max_batch_size=SLOTS,
        max_beam_width=2,
        gather_context_logits=True,
        gather_generation_logits=True,
        lora_target_modules=["attn_q"],
    )
    with running(
        folder,
        max_queue_size=QUEUE,
        max_tokens_in_paged_kv_cache=SLOTS * LONG_SEQ_LEN,
        max_beam_width=2,
        enable_kv_cache_reuse=True,
        guided_decoding_backend="xgrammar",
        cancellation_check_period_ms=1,
    ) as server:
        yield server


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(MODEL / "tokenizer.json"))


@pytest.fixture(scope="module")
def prompt(tokenizer: Tokenizer) -> list[int]:
    ids: list[int] = tokenizer.encode("What is the capital of France?").ids
    return ids


def test_without_streaming_one_response_holds_prompt_and_output(
    triton: Server, prompt: list[int]
) -> None:
    (whole,) = triton.ask(core_inputs(prompt, 6))
    assert whole.final
    assert whole.outputs.keys() == {"output_ids", "sequence_length"}
    assert whole.outputs["output_ids"].dtype == np.int32
    assert whole.outputs["output_ids"].shape == (1, 1, len(prompt) + 6)
    assert whole.outputs["sequence_length"].tolist() == [[len(prompt) + 6]]
    (excluded,) = triton.ask(core_inputs(prompt, 6, exclude_input_in_output=True))
    assert prompt + new_ids([excluded]) == new_ids([whole])
    assert excluded.outputs["sequence_length"].tolist() == [[6]]


def test_a_stream_holds_what_is_new(triton: Server, prompt: list[int]) -> None:
    whole = triton.ask(core_inputs(prompt, 6, exclude_input_in_output=True))
    stream = triton.ask(core_inputs(prompt, 6, streaming=True))
    assert new_ids(stream) == new_ids(whole)
    assert [reply.final for reply in stream] == [False] * 5 + [True]
    assert [reply.outputs["sequence_length"].tolist() for reply in stream] == [[[1]]] * 6


def test_the_end_id_ends_the_stream_with_an_empty_response(
    triton: Server, prompt: list[int]
) -> None:
    free = new_ids(triton.ask(core_inputs(prompt, 4, streaming=True)))
    ended = triton.ask(core_inputs(prompt, 4, streaming=True, end_id=free[2]))
    assert new_ids(ended) == free[: free.index(free[2])]
    assert ended[-1].outputs["output_ids"].shape == (1, 1, 0)
    assert ended[-1].outputs["sequence_length"].tolist() == [[0]]


def test_only_what_was_asked_for_is_returned(triton: Server, prompt: list[int]) -> None:
    inputs = core_inputs(prompt, 2, return_log_probs=True, runtime_top_k=3)
    (reply,) = triton.ask(inputs, outputs=["sequence_length"])
    assert reply.outputs.keys() == {"sequence_length"}
    (reply,) = triton.ask(inputs)
    assert reply.outputs.keys() == {
        *("output_ids", "sequence_length", "cum_log_probs", "output_log_probs")
    }
    assert reply.outputs["cum_log_probs"].shape == (1, 1)
    assert reply.outputs["output_log_probs"].shape == (1, 1, 2)


def test_logits_are_returned(triton: Server, prompt: list[int], tokenizer: Tokenizer) -> None:
    inputs = core_inputs(prompt, 3, return_context_logits=True, return_generation_logits=True)
    (reply,) = triton.ask(inputs)
    vocabulary = tokenizer.get_vocab_size()
    context, generation = (reply.outputs[name] for name in ("context_logits", "generation_logits"))
    assert context.shape == (1, len(prompt), vocabulary)
    assert generation.shape == (1, 1, 3, vocabulary)
    # Greedy decoding: each new token is the likeliest after the previous ones.
    assert context[0, -1].argmax() == generation[0, 0, 0].argmax()
    assert generation[0, 0].argmax(axis=-1).tolist() == new_ids([reply])[len(prompt) :]


def test_sequences_and_beams(triton: Server, prompt: list[int]) -> None:
    sampled = triton.ask(
        core_inputs(
            *(prompt, 5),
            num_return_sequences=2,
            runtime_top_p=1.0,
            temperature=2.0,
            random_seed=np.array([[7]], np.uint64),
            exclude_input_in_output=True,
        )
    )
    assert [reply.final for reply in sampled] == [False, True]
    assert {reply.outputs["sequence_index"].item() for reply in sampled} == {0, 1}
    assert new_ids(sampled[:1]) != new_ids(sampled[1:])
    (beams,) = triton.ask(core_inputs(prompt, 5, beam_width=2))
    assert beams.outputs["output_ids"].shape[:2] == (1, 2)
    assert beams.outputs["sequence_length"].shape == (1, 2)
    assert "sequence_index" not in beams.outputs


def test_rows_of_a_batch_equal_requests_of_their_own(triton: Server, prompt: list[int]) -> None:
    short = prompt[:3]
    inputs = {
        "input_ids": np.array([prompt, short + [0] * (len(prompt) - 3)], np.int32),
        "input_lengths": np.array([[len(prompt)], [3]], np.int32),
        "request_output_len": np.array([[4], [7]], np.int32),
        "streaming": np.array([[True], [True]]),
    }
    replies = triton.ask(inputs)
    assert [reply.final for reply in replies] == [False] * 10 + [True]
    for index, (ids, count) in enumerate(((prompt, 4), (short, 7))):
        row = [reply for reply in replies if reply.outputs["batch_index"].item() == index]
        assert new_ids(row) == new_ids(triton.ask(core_inputs(ids, count, streaming=True)))


def test_kv_cache_reuse_is_told(triton: Server, prompt: list[int]) -> None:
    long_prompt = (prompt * 40)[:200]
    asked = core_inputs(long_prompt, 2, return_kv_cache_reuse_stats=True)
    first, second = (triton.ask(asked)[0].outputs for _ in range(2))
    names = ["kv_cache_alloc_total_blocks", "kv_cache_alloc_new_blocks", "kv_cache_reused_blocks"]
    assert [first[name].tolist() for name in names] == [[[4]], [[4]], [[0]]]
    total, new, reused = (second[name].item() for name in names)
    assert total == new + reused
    assert reused == 3


def test_flat_lists_over_http(triton: Server, prompt: list[int]) -> None:
    ask = {"input_ids": prompt, "input_lengths": len(prompt), "request_output_len": 5}
    status, body = triton.generate("tensorrt_llm", **ask)
    assert status == 200
    assert body["output_ids"][: len(prompt)] == prompt
    word = body["output_ids"][len(prompt) + 1]
    _, stopped = triton.generate("tensorrt_llm", **ask, stop_words_list=[word, 1])
    # A matched stop word stays in the output.
    assert stopped["output_ids"][-1] == word
    assert stopped["output_ids"] == body["output_ids"][: len(stopped["output_ids"])]


@pytest.mark.parametrize(
    ("inputs", "text"),
    [
        ({"input_ids": None}, "A value is required for input_ids"),
        ({"input_ids": np.zeros((1, 0), np.int32)}, "Invalid format for input_ids"),
        ({"request_output_len": as_tensor(0)}, "mMaxNewTokens > 0"),
        ({"stop_words_list": np.array([[[5, 6], [2, 1]]], np.int32)}, "Invalid format for word"),
        ({"bad_words_list": np.array([[[5, 6], [3, -1]]], np.int32)}, "Invalid format for word"),
        ({"bad_words_list": np.array([[[5, 6], [-1, 2]]], np.int32)}, "Invalid format for word"),
        ({"lora_weights": np.zeros((1, 1, 8), np.float16)}, "lora_task_id must be set for LoRA"),
        (
            {"retention_token_range_starts": as_tensor(0)},
            "retention_token_range_ends must be provided, and have the same length as",
        ),
        ({"skip_cross_attn_blocks": as_tensor(True)}, "skip_cross_attn_blocks is not supported"),
        (
            {"guided_decoding_guide_type": as_tensor("lark")},
            "found 'lark'; allowed: json, json_schema, regex, ebnf_grammar",
        ),
        (
            {"guided_decoding_guide_type": as_tensor("regex")},
            "The guide string must be provided unless using GuideType.JSON",
        ),
        (
            {
                "guided_decoding_guide_type": as_tensor("json"),
                "guided_decoding_guide": as_tensor("{}"),
            },
            "guided_decoding_guide: json takes none; use json_schema",
        ),
        (
            {"guided_decoding_guide": as_tensor("a")},
            "guided_decoding_guide_type must be set with guided_decoding_guide",
        ),
        (
            {
                "guided_decoding_guide_type": as_tensor("json"),
                "beam_width": as_tensor(2),
            },
            "Guided decoding does not support with beam search.",
        ),
    ],
)
def test_wrong_inputs_are_told(triton: Server, inputs: dict[str, Any], text: str) -> None:
    given = core_inputs([5, 6, 7], 3) | inputs
    sent = {name: array for name, array in given.items() if array is not None}
    error = error_of(triton.ask(sent, request_id="it"))
    assert error.startswith(
        "An error occurred when processing the input values for request id it, the error was '"
    )
    assert text in error


def test_the_engine_s_own_errors_pass_through(triton: Server) -> None:
    task = np.array([[99]], np.uint64)
    assert error_of(triton.ask(core_inputs([5, 6], 3, lora_task_id=task))) == (
        "LoRA task 99 not found in cache. Please send LoRA weights with request"
    )
    guide = {"guided_decoding_guide_type": "regex", "guided_decoding_guide": "("}
    assert error_of(triton.ask(core_inputs([5, 6], 3, **guide))).startswith(
        "Encountered an error in forwardAsync function: Invalid guide of type regex: "
    )
    too_long = error_of(triton.ask(core_inputs([5] * (LONG_SEQ_LEN + 1), 3)))
    assert f"Prompt length ({LONG_SEQ_LEN + 1}) exceeds maximum input length" in too_long


@pytest.mark.parametrize(
    ("kind", "guide", "pattern"),
    [
        ("json", None, r"[\[{]"),
        ("json_schema", '{"type": "integer", "minimum": 10, "maximum": 99}', r"\d\d"),
        ("regex", r"(no )?[A-F]{3}", r"(no )?[A-F]{3}"),
        ("ebnf_grammar", 'root ::= "x" | "y" "é"', "x|yé"),
    ],
)
@pytest.mark.parametrize("streaming", [True, False])
def test_a_guide_is_followed(
    triton: Server,
    prompt: list[int],
    tokenizer: Tokenizer,
    kind: str,
    guide: str | None,
    pattern: str,
    streaming: bool,
) -> None:
    inputs = core_inputs(
        prompt,
        20 if guide else 1,
        **{"streaming": streaming, "exclude_input_in_output": True, "runtime_top_p": 1.0},
        **{"end_id": tokenizer.token_to_id("<|im_end|>"), "guided_decoding_guide_type": kind},
        **({"guided_decoding_guide": guide} if guide else {}),
    )
    text = tokenizer.decode(new_ids(triton.ask(inputs)))
    assert re.fullmatch(pattern, text if guide else text[0]), text


def test_each_row_follows_its_own_guide(
    triton: Server, prompt: list[int], tokenizer: Tokenizer
) -> None:
    guides = [[b"[a-z]{5}"], [b"[0-9]{7}"]]
    one_row = core_inputs(
        prompt,
        10,
        exclude_input_in_output=True,
        end_id=tokenizer.token_to_id("<|im_end|>"),
        guided_decoding_guide_type="regex",
    )
    inputs = {name: np.concatenate([array, array]) for name, array in one_row.items()}
    replies = triton.ask(inputs | {"guided_decoding_guide": np.array(guides, np.object_)})
    for reply in replies:
        if reply.outputs:
            (guide,) = guides[reply.outputs["batch_index"].item()]
            assert re.fullmatch(guide.decode(), tokenizer.decode(new_ids([reply])))
    assert sum(bool(reply.outputs) for reply in replies) == 2


def test_a_bad_request_does_not_harm_its_neighbours(triton: Server, prompt: list[int]) -> None:
    alone = new_ids(triton.ask(core_inputs(prompt, 50, streaming=True)))
    with triton.stream() as good, triton.stream() as bad:
        good.send(core_inputs(prompt, 50, streaming=True), request_id="good")
        for _ in range(10):
            bad.send(core_inputs(prompt, 0))
            assert bad.next().error
        assert new_ids(good.rest("good")) == alone


def test_retention_is_accepted(triton: Server, prompt: list[int]) -> None:
    inputs = core_inputs(
        *(prompt, 3),
        retention_token_range_starts=0,
        retention_token_range_ends=-1,
        retention_token_range_priorities=80,
        retention_token_range_durations_ms=-1,
        retention_decode_priority=20,
        retention_decode_duration_ms=500,
    )
    assert len(new_ids(triton.ask(inputs))) == len(prompt) + 3


@pytest.mark.parametrize("streaming", [True, False])
def test_stop_ends_the_request_of_that_id(
    triton: Server, prompt: list[int], streaming: bool
) -> None:
    with triton.stream() as stream:
        stream.send(core_inputs(prompt, LONG, streaming=streaming), request_id="long")
        triton.wait_active(1)
        (answer,) = triton.ask(stop_inputs(), request_id="long")
        replies = stream.rest("long")
    assert answer.final
    assert answer.outputs == {}
    assert replies[-1].error is None
    # The last response of a stopped request has no generated tokens.
    assert new_ids(replies[-1:]) == ([] if streaming else prompt)
    assert len(replies) < LONG
    triton.wait_active(0)


def test_stop_on_the_same_stream_is_answered_on_its_own(triton: Server, prompt: list[int]) -> None:
    with triton.stream() as stream:
        stream.send(core_inputs(prompt, LONG), request_id="same")
        triton.wait_active(1)
        stream.send(stop_inputs(), request_id="same")
        finals = [stream.next(), stream.next()]
    assert [reply.final for reply in finals] == [True, True]
    assert sorted(len(reply.outputs) for reply in finals) == [0, 2]


def test_stop_of_an_unknown_id_succeeds_and_without_id_fails(triton: Server) -> None:
    (answer,) = triton.ask(stop_inputs(), request_id="nobody")
    assert answer.final
    assert answer.error is None
    assert error_of(triton.ask(stop_inputs())) == (
        "A request id must be provided for request cancellation"
    )


def test_requests_that_share_an_id_both_end(triton: Server, prompt: list[int]) -> None:
    with triton.stream() as first, triton.stream() as second:
        first.send(core_inputs(prompt, 20, streaming=True), request_id="twin")
        second.send(core_inputs(prompt, 40, streaming=True), request_id="twin")
        assert len(new_ids(first.rest("twin"))) == 20
        assert len(new_ids(second.rest("twin"))) == 40
        # Wait for the metric to return to 0. It could still count the two ended requests, and a
        # stop sent before its requests would have no effect.
        triton.wait_active(0)
        for stream in (first, second):
            stream.send(core_inputs(prompt, LONG), request_id="twin")
        triton.wait_active(2)
        triton.ask(stop_inputs(), request_id="twin")
        assert new_ids(first.rest("twin")) == new_ids(second.rest("twin")) == prompt


def test_stop_reaches_the_ensemble_by_its_id(triton: Server) -> None:
    with triton.stream() as stream:
        stream.send(text_inputs("a", LONG, end_id=-1), "ensemble", request_id="text")
        triton.wait_active(1)
        triton.ask(stop_inputs(), request_id="text")
        (reply,) = stream.rest("text")
    assert reply.outputs["text_output"].tolist() == [b"a"]


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize("model", ["tensorrt_llm", "tensorrt_llm_bls"])
def test_a_cancelled_call_stops_the_engine(
    triton: Server, prompt: list[int], model: str, streaming: bool
) -> None:
    tokens = []
    for _ in range(3):
        triton.wait_active(0)
        ended = triton.metric("nv_llm_output_token_len_count")
        generated = triton.metric("nv_llm_output_token_len_sum")
        with triton.stream() as stream:
            if model == "tensorrt_llm":
                stream.send(core_inputs(prompt, LONG, streaming=streaming))
            else:
                stream.send(text_inputs("a", LONG, end_id=-1, stream=streaming), model)
            triton.wait_active(1)
        # Count the engine's own steps, which a busy machine slows as much as the cancellation.
        triton.wait_metric(ended + 1, "nv_llm_output_token_len_count")
        tokens.append(triton.metric("nv_llm_output_token_len_sum") - generated)
    # The median of three, as the machine may stop this process once.
    assert median(tokens) < SOON, tokens


@pytest.mark.slow
def test_polling_for_cancelled_calls_meets_their_end(triton: Server, prompt: list[int]) -> None:
    # Triton 2.51 crashes if a response sender is polled while its final response is sent.
    for count in range(1, 100):
        with triton.stream() as stream:
            for number in range(QUEUE):
                inputs = core_inputs(prompt, 1 + count % 4, streaming=True)
                stream.send(inputs, request_id=f"{number}")
            finals = 0
            while finals < QUEUE:
                finals += stream.next().final
    triton.wait_active(0)


def test_a_full_queue_refuses_only_what_does_not_fit(triton: Server, prompt: list[int]) -> None:
    full = f"Maximum queue size of {QUEUE} has been reached, please try again later"
    with triton.stream() as stream:
        for number in range(SLOTS + QUEUE):
            stream.send(core_inputs(prompt, LONG), request_id=f"{number}")
            triton.wait_active(min(number + 1, SLOTS))
            # Requests are answered in order: after this answer, the engine has the previous
            # request.
            stream.send(stop_inputs(), request_id="nobody")
            assert stream.next().request_id == "nobody"
        stream.send(core_inputs(prompt, LONG), request_id="too many")
        assert full in (stream.next().error or "")
        for number in range(SLOTS + QUEUE):
            triton.ask(stop_inputs(), request_id=f"{number}")
        ended = {stream.next().request_id for _ in range(SLOTS + QUEUE)}
    assert ended == {f"{number}" for number in range(SLOTS + QUEUE)}
    triton.wait_active(0)


def test_metrics_have_the_families_and_labels_of_upstream(
    triton: Server, prompt: list[int]
) -> None:
    labels = {"model": "tensorrt_llm", "version": "1"}
    finished = triton.metric("nv_llm_output_token_len_count", **labels)
    generated = triton.metric("nv_llm_output_token_len_sum", **labels)
    triton.ask(core_inputs(prompt, 7, streaming=True))
    triton.wait_active(0)
    assert triton.metric("nv_llm_output_token_len_count", **labels) == finished + 1
    assert triton.metric("nv_llm_output_token_len_sum", **labels) == generated + 7
    for family, (label, values) in FAMILIES.items():
        for value in values:
            assert triton.metric(family, **(labels | {label: value})) >= 0
    assert triton.metric("nv_trt_llm_request_metrics", request_type="max") == SLOTS
    timestamp = triton.metric("nv_trt_llm_general_metrics", general_type="timestamp")
    assert abs(timestamp - time.time()) < 60

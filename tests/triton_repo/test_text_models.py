"""Text models in a real tritonserver: ensemble, BLS, preprocessing and postprocessing.

Decoupled models are of release 0.19. The others are of 0.17, whose core model imports the executor
under TensorRT-LLM's name.
"""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from tests.support.triton_server import (
    MODEL,
    Server,
    as_tensor,
    core_inputs,
    error_of,
    new_ids,
    repository_parameters,
    running,
    serving,
    text_inputs,
)
from triton_repo.cpu_executor import engine
from triton_repo.cpu_executor.install import install
from triton_repo.parameters import BLS, POSTPROCESSING, PREPROCESSING, Value, parameters_of
from triton_repo.releases import V0_19
from triton_repo.render import render

PROMPT = "What is the capital of France?"
LONG = 1900
TEXT_MODELS = ("ensemble", "tensorrt_llm_bls")
EMPTY_WORDS = {"bad_words": "", "stop_words": ""}


@pytest.fixture(scope="module")
def triton(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("text")
    engine.build(MODEL, folder / "engine", max_beam_width=2, max_draft_len=3)
    add_accumulating_bls(folder)
    options: dict[str, Value] = {"max_beam_width": 2, "guided_decoding_backend": "xgrammar"}
    with running(folder, release=V0_19, **options) as server:
        yield server


def add_accumulating_bls(folder: Path) -> None:
    """Add a second BLS model that differs in one parameter."""
    values = repository_parameters(folder, accumulate_tokens=True)
    own = {entry.name for entry in parameters_of(V0_19) if BLS in entry.models}
    given = {name: value for name, value in values.items() if name in own}
    render(folder, given, models=[BLS], release=V0_19)
    target = folder / "repository" / "accumulating_bls"
    shutil.copytree(folder / BLS, target)
    config = (target / "config.pbtxt").read_text(encoding="utf-8")
    config = config.replace(f'name: "{BLS}"', 'name: "accumulating_bls"')
    (target / "config.pbtxt").write_text(config, encoding="utf-8")


@pytest.fixture(scope="module")
def unary_triton(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("unary")
    engine.build(
        MODEL,
        folder / "engine",
        gather_generation_logits=True,
        lora_target_modules=["attn_q"],
        max_lora_rank=1,
    )
    install(folder / "repository" / "tensorrt_llm" / "1")
    with running(folder, decoupled_mode=False, exclude_input_in_output=True) as server:
        yield server


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(MODEL / "tokenizer.json"))


@pytest.mark.parametrize("model", TEXT_MODELS)
def test_generate_answers_with_prompt_and_text(triton: Server, model: str) -> None:
    status, body = triton.generate(model, text_input=PROMPT, max_tokens=20, **EMPTY_WORDS)
    assert status == 200
    assert body["model_name"] == model
    assert body["text_output"].startswith(PROMPT)
    status, excluded = triton.generate(
        model, text_input=PROMPT, max_tokens=20, exclude_input_in_output=True, **EMPTY_WORDS
    )
    assert PROMPT + excluded["text_output"] == body["text_output"]


@pytest.mark.parametrize("model", TEXT_MODELS)
def test_generate_stream_sends_a_text_per_token(triton: Server, model: str) -> None:
    ask = {"text_input": PROMPT, "max_tokens": 8, **EMPTY_WORDS}
    events = triton.generate_stream(model, **ask, stream=True)
    assert 1 < len(events) <= 8
    _, whole = triton.generate(model, **ask, exclude_input_in_output=True)
    assert "".join(event["text_output"] for event in events) == whole["text_output"]


def test_accumulate_tokens_sends_the_whole_text_each_time(triton: Server) -> None:
    ask = {"text_input": PROMPT, "max_tokens": 8, **EMPTY_WORDS}
    events = triton.generate_stream("accumulating_bls", **ask, stream=True)
    texts = [event["text_output"] for event in events]
    _, whole = triton.generate("tensorrt_llm_bls", **ask, exclude_input_in_output=True)
    assert len(texts) > 1
    assert texts[-1] == whole["text_output"]
    assert all(later.startswith(earlier) for earlier, later in pairwise(texts))


def test_accumulate_tokens_refuses_beams_and_stops_the_inner_request(triton: Server) -> None:
    finished = triton.metric("nv_llm_output_token_len_count")
    inputs = text_inputs(PROMPT, LONG, beam_width=2, stream=True, end_id=-1)
    assert error_of(triton.ask(inputs, "accumulating_bls")) == (
        "Accumulation of tokens is only implemented for beam width = 1"
    )
    # Running to its end would take seconds.
    triton.wait_metric(finished + 1, "nv_llm_output_token_len_count")


@pytest.mark.parametrize("model", TEXT_MODELS)
def test_text_and_its_other_outputs_have_the_declared_shapes(triton: Server, model: str) -> None:
    inputs = text_inputs(PROMPT, 4, beam_width=2, return_log_probs=True, top_k=5)
    outputs = ["text_output", "cum_log_probs", "output_log_probs"]
    data = triton.ask(inputs, model, outputs=outputs)[0].outputs
    assert data.keys() == set(outputs)
    assert data["text_output"].shape == (2,)
    assert data["cum_log_probs"].shape == (1, 2)
    assert data["output_log_probs"].shape[:2] == (1, 2)


@pytest.mark.parametrize("model", TEXT_MODELS)
def test_return_perf_metrics_brings_what_it_says(triton: Server, model: str) -> None:
    names = ("arrival_time_ns", "first_scheduled_time_ns", "first_token_time_ns")
    times = [*names, "last_token_time_ns"]
    drafts = ["acceptance_rate", "total_accepted_draft_tokens", "total_draft_tokens"]
    outputs = ["text_output", "kv_cache_alloc_new_blocks", *times, *drafts]
    before = time.monotonic_ns()
    data = triton.ask(text_inputs(PROMPT, 8, return_perf_metrics=True), model, outputs=outputs)[0]
    after = time.monotonic_ns()
    assert data.outputs.keys() == set(outputs)
    found = [data.outputs[name] for name in times]
    assert {(array.dtype.name, array.shape) for array in found} == {("int64", (1, 1))}
    # Both use the machine's clock. The executor's has microseconds, hence the margin.
    moments = [before - 1000, *(array.item() for array in found), after]
    assert moments == sorted(moments)
    assert moments[3] < moments[4]
    assert [data.outputs[name].item() for name in drafts] == [0, 0, 0]
    assert data.outputs["kv_cache_alloc_new_blocks"].item() == 1
    (without,) = [
        r for r in triton.ask(text_inputs(PROMPT, 2), model, outputs=outputs) if r.outputs
    ]
    assert without.outputs.keys() == {"text_output"}


def test_draft_tokens_are_verified(triton: Server, tokenizer: Tokenizer) -> None:
    prompt = tokenizer.encode(PROMPT).ids
    plain = new_ids(triton.ask(core_inputs(prompt, 5, streaming=True)))
    drafts = np.array([[*plain[:2], plain[2] ^ 1]], np.int32)
    inputs = core_inputs(prompt, 5, streaming=True, return_perf_metrics=True)
    replies = triton.ask(inputs | {"draft_input_ids": drafts})
    assert new_ids(replies) == plain
    assert [reply.outputs["sequence_length"].item() for reply in replies] == [3, 1, 1]
    last = replies[-1].outputs
    assert last["total_draft_tokens"].item() == 3
    assert last["total_accepted_draft_tokens"].item() == 2
    assert last["acceptance_rate"].item() == np.float32(2 / 3)


@pytest.mark.parametrize(
    ("more", "text"),
    [
        (
            {"draft_input_ids": np.full((1, 4), 5, np.int32)},
            "Draft tokens length (4) exceeds maximum draft tokens length (3).",
        ),
        (
            {"prompt_embedding_table": np.zeros((1, 1, 8), np.float16)},
            "Input token extra ids must be provided when enabling kv cache reuse with prompt table",
        ),
        ({"mrope_position_deltas": np.array([[1]], np.int64)}, "must be given together"),
        ({"lookahead_window_size": np.array([[4]], np.int32)}, "must be given together"),
        (
            {
                "mrope_rotary_cos_sin": np.zeros((1, 8), np.float32),
                "mrope_position_deltas": np.array([[1]], np.int64),
            },
            "mrope_config is not supported by the CPU executor",
        ),
        (
            {
                f"lookahead_{name}": np.array([[4]], np.int32)
                for name in ("window_size", "ngram_size", "verification_set_size")
            },
            "lookahead_config is not supported by the CPU executor",
        ),
    ],
)
def test_what_the_engine_has_not_is_refused_by_name(
    triton: Server, more: dict[str, Any], text: str
) -> None:
    assert text in error_of(triton.ask(core_inputs([5, 6, 7], 5) | more))


@pytest.mark.parametrize("model", TEXT_MODELS)
def test_several_prompts_are_told_apart_by_batch_index(triton: Server, model: str) -> None:
    texts = np.array([[b"The capital of France"], [b"Count from 1 to 10"]], np.object_)
    inputs = {"text_input": texts, "max_tokens": np.full((2, 1), 5, np.int32)}
    replies = triton.ask(inputs, model, outputs=["text_output", "batch_index"])
    found = {
        reply.outputs["batch_index"].item(): reply.outputs["text_output"][0].decode()
        for reply in replies
        if reply.outputs
    }
    assert found.keys() == {0, 1}
    for index, text in enumerate(texts[:, 0]):
        assert found[index].startswith(text.decode())


@pytest.mark.parametrize("model", TEXT_MODELS)
def test_a_guide_is_passed_on(triton: Server, model: str) -> None:
    guide = {"guided_decoding_guide_type": "regex", "guided_decoding_guide": "[A-Z]{3}-[0-9]{2}"}
    ask = {"text_input": PROMPT, "max_tokens": 20, "exclude_input_in_output": True, **EMPTY_WORDS}
    _, body = triton.generate(model, **ask, **guide)
    assert re.fullmatch("[A-Z]{3}-[0-9]{2}", body["text_output"])
    status, body = triton.generate(model, **ask, **guide | {"guided_decoding_guide": "("})
    assert status == 400
    assert "Invalid guide of type regex" in body["error"]


def test_stop_words_end_the_text_and_bad_words_stay_out(triton: Server) -> None:
    ask = {"text_input": PROMPT, "max_tokens": 10, "bad_words": "", "stop_words": ""}
    word = triton.generate_stream("ensemble", **ask, stream=True)[0]["text_output"]
    ask["exclude_input_in_output"] = True
    _, stopped = triton.generate("ensemble", **ask | {"stop_words": word})
    _, banned = triton.generate("ensemble", **ask | {"bad_words": word})
    # A matched stop word stays in the output.
    assert stopped["text_output"] == word
    assert not banned["text_output"].startswith(word)


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"max_tokens": 0}, "max_tokens must be a single value > 0"),
        ({"num_draft_tokens": 3}, "cannot perform speculative decoding without draft model"),
        (
            {"num_draft_tokens": 3, "stream": True},
            "streaming is not supported with speculative decoding",
        ),
        ({"image_url_input": "x"}, "image_url_input: multimodal inputs are not supported"),
        ({"temperature": -1.0}, "temperature >= 0"),
    ],
)
def test_bls_refuses(triton: Server, more: dict[str, Any], text: str) -> None:
    status, body = triton.generate(
        "tensorrt_llm_bls", **{"text_input": "a", "max_tokens": 3} | more
    )
    assert status >= 400
    assert text in body["error"]


def test_preprocessing_lays_out_ids_and_words(triton: Server, tokenizer: Tokenizer) -> None:
    query = np.array([[b"Tell me more"], ["日本 🎉".encode()]], np.object_)
    words = np.array([[b"one two", b"", b"three"], [b"four", b"", b""]], np.object_)
    outputs = triton.unary(
        "preprocessing",
        {
            "QUERY": query,
            "REQUEST_OUTPUT_LEN": np.array([[3], [4]], np.int32),
            "STOP_WORDS_DICT": words,
        },
    )
    rows = [tokenizer.encode(text.decode()).ids for text in query[:, 0]]
    longest = max(len(row) for row in rows)
    pad = outputs["OUT_PAD_ID"][0, 0]
    padded = [row + [pad] * (longest - len(row)) for row in rows]
    assert outputs["INPUT_ID"].tolist() == padded
    assert outputs["REQUEST_INPUT_LEN"].tolist() == [[len(row)] for row in rows]
    assert outputs["REQUEST_OUTPUT_LEN"].tolist() == [[3], [4]]
    assert outputs["DECODER_INPUT_ID"].tolist() == [[pad], [pad]]
    assert outputs["REQUEST_DECODER_INPUT_LEN"].tolist() == [[1], [1]]
    assert outputs["BAD_WORDS_IDS"].shape == (2, 2, 0)
    assert outputs["EMBEDDING_BIAS"].shape == (2, 0)
    one_two, three, four = (
        tokenizer.encode(word, add_special_tokens=False).ids
        for word in ("one two", "three", "four")
    )
    width = len(one_two) + len(three)
    first_ends = [len(one_two), width] + [-1] * (width - 2)
    second_ids = four + [0] * (width - len(four))
    second_ends = [len(four)] + [-1] * (width - 1)
    assert outputs["STOP_WORDS_IDS"].tolist() == [
        [one_two + three, first_ends],
        [second_ids, second_ends],
    ]


def test_preprocessing_spreads_bias_over_the_ids_of_a_word(
    triton: Server, tokenizer: Tokenizer
) -> None:
    outputs = triton.unary(
        "preprocessing",
        text_query("a")
        | {
            "STOP_WORDS_DICT": as_tensor(""),
            "EMBEDDING_BIAS_WORDS": np.array([[b"Paris", b"Paris"]], np.object_),
            "EMBEDDING_BIAS_WEIGHTS": np.array([[1.5, 2.0]], np.float32),
            "END_ID": as_tensor(11),
            "PAD_ID": as_tensor(12),
        },
    )
    expected = np.zeros(tokenizer.get_vocab_size(), np.float32)
    np.add.at(expected, tokenizer.encode("Paris").ids, 3.5)
    np.testing.assert_array_equal(outputs["EMBEDDING_BIAS"], expected[None])
    assert outputs["STOP_WORDS_IDS"].tolist() == [[[0], [-1]]]
    assert outputs["OUT_END_ID"].tolist() == [[11]]
    assert outputs["OUT_PAD_ID"].tolist() == [[12]]


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"IMAGE_URL": as_tensor("x")}, "IMAGE_URL: multimodal inputs are not supported"),
        ({"QUERY": np.array([[b"\xff"]], np.object_)}, "allowed: UTF-8"),
        (
            {
                "EMBEDDING_BIAS_WORDS": as_tensor("a"),
                "EMBEDDING_BIAS_WEIGHTS": np.ones((1, 2), np.float32),
            },
            "EMBEDDING_BIAS_WEIGHTS: found shape [1, 2]; allowed: that of the words, [1, 1]",
        ),
    ],
)
def test_preprocessing_refuses(triton: Server, more: dict[str, Any], text: str) -> None:
    assert text in error_of(triton.ask(text_query("a") | more, "preprocessing"))


def text_query(text: str) -> dict[str, Any]:
    return {"QUERY": as_tensor(text), "REQUEST_OUTPUT_LEN": as_tensor(1)}


@pytest.mark.parametrize("trusted", [False, True])
@pytest.mark.slow
def test_a_tokenizers_own_code_runs_only_where_it_is_trusted(tmp_path: Path, trusted: bool) -> None:
    """Check both models with a tokenizer class in its folder. Running that code writes a file."""
    folder = tmp_path / "tokenizer"
    shutil.copytree(MODEL, folder)
    ran = tmp_path / "ran"
    (folder / "own.py").write_text(
        "import os\nfrom transformers import PreTrainedTokenizerFast\n"
        f"open({str(ran)!r}, 'a').write(f'{{os.getpid()}}\\n')\n"
        "class Own(PreTrainedTokenizerFast):\n    pass\n"
    )
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_bytes())
    config |= {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": [None, "own.Own"]}}
    path.write_text(json.dumps(config))
    engine.build(MODEL, tmp_path / "engine")
    values = {
        "triton_max_batch_size": 8,
        "engine_dir": str(tmp_path / "engine"),
        "tokenizer_dir": str(folder),
        "preprocessing_instance_count": 1,
        "postprocessing_instance_count": 1,
    }
    models = [PREPROCESSING, POSTPROCESSING]
    render(
        tmp_path / "repository", values | {"trust_remote_code": True} if trusted else values, models
    )
    if not trusted:
        with pytest.raises(AssertionError, match="trust_remote_code"), serving(tmp_path):
            pass
        assert not ran.exists()
        return
    with serving(tmp_path):
        pids = set(ran.read_text().split())
    assert len(pids) == 2


def test_postprocessing_returns_a_text_per_beam(triton: Server, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("Good morning to you").ids
    tokens = np.array([[ids, ids]], np.int32)
    lengths = np.array([[len(ids), 2]], np.int32)
    outputs = triton.unary("postprocessing", {"TOKENS_BATCH": tokens, "SEQUENCE_LENGTH": lengths})
    texts = [tokenizer.decode(ids), tokenizer.decode(ids[:2])]
    assert [text.decode() for text in outputs["OUTPUT"]] == texts


def test_unary_calls_work_without_decoupled_mode(unary_triton: Server) -> None:
    outputs = unary_triton.unary("tensorrt_llm", core_inputs([5, 6, 7], 5))
    assert outputs["output_ids"].shape == (1, 1, 5)
    text = unary_triton.unary("ensemble", text_inputs(PROMPT, 5))["text_output"]
    assert (
        text.tolist()
        == unary_triton.unary("tensorrt_llm_bls", text_inputs(PROMPT, 5))["text_output"].tolist()
    )


def test_tensors_pass_under_tensorrt_llms_import_names(
    unary_triton: Server, tokenizer: Tokenizer
) -> None:
    inputs = core_inputs([5, 6, 7], 2, return_generation_logits=True)
    outputs = unary_triton.unary("tensorrt_llm", inputs)
    logits = outputs["generation_logits"]
    assert logits.shape == (1, 1, 2, tokenizer.get_vocab_size())
    assert logits[0, 0].argmax(axis=-1).tolist() == outputs["output_ids"][0, 0].tolist()
    adapter = {
        "lora_task_id": np.array([[7]], np.uint64),
        "lora_weights": np.ones((1, 1, 3), np.float16),
        "lora_config": np.array([[[1, 0, 1]]], np.int32),
    }
    error = error_of(unary_triton.ask(core_inputs([5, 6, 7], 2) | adapter))
    assert "lora_weights has to few values for attn_q" in error


def test_a_guide_needs_the_backend_parameter(unary_triton: Server) -> None:
    inputs = core_inputs([5, 6, 7], 5, guided_decoding_guide_type="json")
    assert "but GuidedDecoder is not setup" in error_of(unary_triton.ask(inputs))


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"streaming": True}, "Streaming is only supported in decoupled mode."),
        ({"num_return_sequences": 2}, "so does num_return_sequences > 1"),
    ],
)
def test_several_responses_need_decoupled_mode(
    unary_triton: Server, more: dict[str, Any], text: str
) -> None:
    assert text in error_of(unary_triton.ask(core_inputs([5, 6, 7], 5, **more)))
    assert len(new_ids(unary_triton.ask(core_inputs([5, 6, 7], 5)))) == 5

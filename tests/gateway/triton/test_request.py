"""Requests assembled from bytes, compared with the encoding of protobuf."""

from __future__ import annotations

import struct
import tracemalloc
from array import array
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.grpc import model_config_pb2
from tritonclient.grpc import service_pb2 as pb

from adapters.adapter import Converted
from gateway.errors import EngineError
from gateway.generation.lora import Lora
from gateway.generation.options import Guide
from gateway.triton.model_capabilities import ModelCapabilities, read_capabilities
from gateway.triton.names import CORE, Input, read_inputs
from gateway.triton.request import RequestBuilder, varint
from gateway.triton.tensors import generation_request
from tests.support.generations import generation


def _config() -> model_config_pb2.ModelConfig:
    config = model_config_pb2.ModelConfig()
    for name, datatype in (
        ("input_ids", "TYPE_INT32"),
        ("request_output_len", "TYPE_INT32"),
        ("random_seed", "TYPE_UINT64"),
    ):
        config.input.add(name=name, data_type=datatype)
    return config


INPUTS = read_inputs(_config(), CORE)
NEEDED = {
    "INT32": (
        *("input_ids", "input_lengths", "request_output_len", "runtime_top_k", "end_id", "pad_id"),
        *("stop_words_list", "bad_words_list", "beam_width", "min_length"),
    ),
    "FP32": (
        *("embedding_bias", "runtime_top_p", "temperature", "len_penalty", "presence_penalty"),
    ),
    "UINT64": ("random_seed", "lora_task_id"),
    "BOOL": (
        *("stop", "streaming", "return_log_probs", "return_generation_logits"),
        "return_perf_metrics",
    ),
    "STRING": ("guided_decoding_guide", "guided_decoding_guide_type"),
}


def _capabilities(max_seq_len: int = 64, vocab_size: int = 1000) -> ModelCapabilities:
    config = model_config_pb2.ModelConfig()
    for datatype, names in NEEDED.items():
        for name in names:
            config.input.add(name=name, data_type=f"TYPE_{datatype}")
    return read_capabilities("m", config, max_seq_len=max_seq_len, vocab_size=vocab_size)


async def _no_weights() -> Converted:
    raise NotImplementedError


def _lora(task_id: int) -> Lora:
    return Lora("sql", task_id, 0, _no_weights)


def _parsed(build: RequestBuilder) -> pb.ModelInferRequest:
    return pb.ModelInferRequest.FromString(build.request.data)


@given(st.text(min_size=1, max_size=300), st.lists(st.integers(-(2**31), 2**31 - 1), max_size=400))
def test_any_id_and_prompt(request_id: str, ids: list[int]) -> None:
    build = RequestBuilder("tensorrt_llm", INPUTS, request_id)
    build.numbers("prompt", ids, len(ids))
    build.scalar("max_tokens", 7)
    build.output("output_ids")
    request = _parsed(build)
    assert (request.model_name, request.id) == ("tensorrt_llm", request_id)
    assert build.request.id == request_id
    assert request.parameters["triton_enable_empty_final_response"].bool_param
    assert [(i.name, i.datatype, list(i.shape)) for i in request.inputs] == [
        ("input_ids", "INT32", [1, len(ids)]),
        ("request_output_len", "INT32", [1, 1]),
    ]
    prompt, limit = request.raw_input_contents
    assert prompt == struct.pack(f"<{len(ids)}i", *ids)
    assert limit == struct.pack("<i", 7)
    assert [output.name for output in request.outputs] == ["output_ids"]


def test_an_unsigned_value_wraps() -> None:
    build = RequestBuilder("tensorrt_llm", INPUTS, "x")
    build.scalar("seed", -1)
    assert _parsed(build).raw_input_contents[0] == b"\xff" * 8


def test_what_the_model_has_no_input_for_is_an_error() -> None:
    with pytest.raises(EngineError, match="guide"):
        RequestBuilder("tensorrt_llm", {}, "x").texts("guide", ["{}"])


@pytest.mark.parametrize("length", [0, 1, 4095, 4096, 128_000])
def test_a_long_prompt_is_sent_from_where_it_is(length: int) -> None:
    ids = array("i", range(length))
    build = RequestBuilder("tensorrt_llm", INPUTS, "x")
    build.scalar("max_tokens", 7)
    build.int32s("prompt", ids, length)
    build.scalar("seed", 1)
    build.output("output_ids")
    request = _parsed(build)
    assert [(i.name, list(i.shape)) for i in request.inputs] == [
        ("request_output_len", [1, 1]),
        ("input_ids", [1, length]),
        ("random_seed", [1, 1]),
    ]
    limit, prompt, _ = request.raw_input_contents
    assert (limit, prompt) == (struct.pack("<i", 7), struct.pack(f"<{length}i", *ids))
    views = [piece for piece in build.request.pieces if isinstance(piece, memoryview)]
    assert [view.obj is ids for view in views] == [True] * (4 * length >= 2**14)


def test_a_request_takes_no_memory_for_its_prompt() -> None:
    capabilities = _capabilities(max_seq_len=200_000)
    asked = generation(prompt_ids=array("i", range(128_000)))
    generation_request(capabilities, asked)  # fill the caches of the model first
    tracemalloc.start()
    request = generation_request(capabilities, asked)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**14
    assert len(request.data) > 4 * 128_000


def test_ids_for_a_model_that_declares_another_type() -> None:
    inputs = {"prompt": Input("input_ids", "INT64")}
    build = RequestBuilder("tensorrt_llm", inputs, "x")
    build.int32s("prompt", array("i", [5, 2**31 - 1]), 2)
    assert _parsed(build).raw_input_contents[0] == struct.pack("<2q", 5, 2**31 - 1)


def test_the_choices_of_one_request_share_its_bias() -> None:
    size = 5000
    capabilities = _capabilities(vocab_size=size)
    biased = generation(logit_bias=((7, 1.5), (999, -2.0)))
    one, other = (
        generation_request(capabilities, replace(biased, request_id=name)) for name in "ab"
    )
    assert one.pieces[1] is other.pieces[1]
    request = pb.ModelInferRequest.FromString(b"".join(one.pieces))
    assert (request.inputs[-1].name, list(request.inputs[-1].shape)) == (
        "embedding_bias",
        [1, size],
    )
    bias = struct.unpack(f"<{size}f", request.raw_input_contents[-1])
    assert {token_id: value for token_id, value in enumerate(bias) if value} == {7: 1.5, 999: -2.0}


@pytest.mark.parametrize("name", ["stop_ids", "bad_ids"])
def test_the_choices_of_one_request_share_their_words(name: str) -> None:
    words = ((7,) * 3000, (8, 9))
    worded = generation(**{name: words})
    one, other = (
        generation_request(_capabilities(), replace(worded, request_id=name)) for name in "ab"
    )
    views = [
        [piece for piece in asked.pieces if isinstance(piece, memoryview)] for asked in (one, other)
    ]
    assert [len(each) for each in views] == [1, 1]
    assert views[0][0].obj is views[1][0].obj
    request = pb.ModelInferRequest.FromString(one.data)
    (place,) = [n for n, tensor in enumerate(request.inputs) if tensor.name.endswith("_words_list")]
    assert list(request.inputs[place].shape) == [1, 2, 3002]
    ends = [3000, 3002, *[-1] * 3000]
    assert array("i", request.raw_input_contents[place]).tolist() == [*[7] * 3000, 8, 9, *ends]


ASKED = st.fixed_dictionaries(
    {
        "end_id": st.sampled_from([None, 2, 3]),
        "stop_ids": st.sampled_from([(), ((5,),), ((5, 6), (7,)), ((8,) * 600,)]),
        "bad_ids": st.sampled_from([(), ((9,),)]),
        "beams": st.sampled_from([0, 2, 3]),
        "logprobs": st.sampled_from([None, 0, 2]),
        "length_penalty": st.sampled_from([1.0, 0.5]),
        "usage": st.booleans(),
        "guide": st.sampled_from([None, Guide("json", "{}")]),
        "lora": st.sampled_from([None, _lora(7), _lora(8)]),
        "temperature": st.sampled_from([0.0, 0.5, 1.0]),
        "top_p": st.sampled_from([0.0, 0.9, 1.0]),
        "top_k": st.sampled_from([0, 1, 50]),
        "min_tokens": st.sampled_from([0, 3]),
        "plain": st.sampled_from([(), (("presence_penalty", 0.5),)]),
        "logit_bias": st.sampled_from([(), ((7, 1.5),)]),
    }
)


@given(st.lists(st.tuples(ASKED, st.integers(0, 2**63 - 1)), min_size=2, max_size=8))
def test_a_request_is_the_same_whatever_was_asked_before(asked: list[tuple[Any, int]]) -> None:
    known = _capabilities()
    for wanted, number in asked:
        wish = generation(**wanted, request_id=str(number), seed=number, prompt_ids=[1] * 3)
        request = generation_request(known, wish)
        assert request == generation_request(_capabilities(), wish)
    assert all(len(part.contents) < 4096 for part in known.parts.values())


def test_no_more_is_kept_of_requests_than_there_is_room_for() -> None:
    known = _capabilities()
    for number in range(1000):
        wish = generation(temperature=0.1 + number / 1000)
        generation_request(known, wish)
    assert 0 < len(known.parts) <= 64


@given(st.integers(0, 2**35))
def test_varint(value: int) -> None:
    # Check the value alone: a message of 2**35 bytes is too large to build here.
    decoded, shift = 0, 0
    for byte in varint(value):
        decoded |= (byte & 0x7F) << shift
        shift += 7
    assert decoded == value

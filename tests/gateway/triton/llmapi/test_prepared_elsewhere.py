"""Requests prepared for another repository's text model, with parameters that llmapi lacks."""

from __future__ import annotations

from array import array
from dataclasses import replace
from typing import Any

import pytest
from tritonclient.grpc import service_pb2 as pb

from gateway.errors import EngineUnavailable
from gateway.generation.engine_request import Generation, TextPrompt
from gateway.generation.options import GenerationParams, Guide
from gateway.triton.llmapi.model import read_llmapi_capabilities
from gateway.triton.llmapi.tensors import generation_request
from tests.support.fake_llmapi import FakeLlmapi

PLAIN = Generation(
    request_id="a",
    prompt_ids=array("i", [1]),
    max_tokens=1,
    seed=1,
    params=GenerationParams(),
    text=TextPrompt("x"),
)


@pytest.mark.parametrize(
    ("params", "text", "more"),
    [
        ({"guide": Guide("json_schema", "{}")}, {}, {}),
        ({}, {"bad": ("no",)}, {}),
        ({}, {"bias": (("no", 1.0),)}, {}),
        ({}, {}, {"beams": 2}),
    ],
    ids=["guide", "bad words", "bias", "beams"],
)
async def test_what_has_no_input_is_not_left_out(
    params: dict[str, Any], text: dict[str, Any], more: dict[str, Any]
) -> None:
    config = (await FakeLlmapi().ModelConfig(pb.ModelConfigRequest(name="m"), None)).config
    capabilities = read_llmapi_capabilities(
        "m", config, max_seq_len=9, vocab_size=9, tokens_per_block=32
    )
    assert generation_request(capabilities, PLAIN, TextPrompt("x")).id == "a"
    asked = replace(PLAIN, params=replace(PLAIN.params, **params), **more)
    with pytest.raises(EngineUnavailable):
        generation_request(capabilities, asked, replace(TextPrompt("x"), **text))

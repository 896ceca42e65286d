"""Responses of the GPT repository, which have no length beside the ids, and no stop words."""

from __future__ import annotations

import struct

import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2
from tritonclient.grpc import service_pb2 as pb

from gateway.triton.model_capabilities import ModelCapabilities, read_capabilities
from gateway.triton.tensors import generation_request, token_delta
from tests.support.generations import generation
from triton_repo.render import TEMPLATES

PROMPT = [7, 8]
END = 2


def capabilities() -> ModelCapabilities:
    text = (TEMPLATES / "gpt" / "tensorrt_llm" / "config.pbtxt").read_text(encoding="utf-8")
    config = text_format.Parse(text, model_config_pb2.ModelConfig())
    return read_capabilities("tensorrt_llm", config, max_seq_len=64, vocab_size=100)


@pytest.mark.parametrize(
    ("generated", "stop_ids", "kept"),
    [
        # The model pads the ids up to max_tokens with the pad id, which is the end id here.
        ([5, 6, END, END, END], (), [5, 6]),
        ([END, END, END, END, END], (), []),
        ([5, 6, 7, 8, 9], (), [5, 6, 7, 8, 9]),
        ([5, 6, 7, 8, 9], ((6, 7),), [5, 6, 7]),
        ([5, 6, END, 6, 7], ((6, 7),), [5, 6]),
        # A stop word counts only in the generated tokens, not across the end of the prompt.
        ([9, 5, 6, 7, 8], ((8, 9), (6, 7), (7,)), [9, 5, 6, 7]),
    ],
)
def test_what_is_kept_of_an_answer(
    generated: list[int], stop_ids: tuple[tuple[int, ...], ...], kept: list[int]
) -> None:
    ids = [*PROMPT, *generated]
    response = pb.ModelInferResponse(raw_output_contents=[struct.pack(f"<{len(ids)}i", *ids)])
    response.outputs.add(name="output_ids", datatype="INT32", shape=(1, 1, len(ids)))
    asked = generation(prompt_ids=PROMPT, end_id=END, stop_ids=stop_ids)
    delta = token_delta(response, capabilities(), asked)
    assert delta.final
    assert delta.ids == kept


@pytest.mark.parametrize(("end_id", "sent"), [(END, END), (None, -1)])
def test_ids_that_the_model_needs_are_always_sent(end_id: int | None, sent: int) -> None:
    asked = generation(prompt_ids=PROMPT, end_id=end_id, stop_ids=((6, 7),))
    request = pb.ModelInferRequest.FromString(generation_request(capabilities(), asked).data)
    contents = dict(
        zip([each.name for each in request.inputs], request.raw_input_contents, strict=True)
    )
    assert contents["end_id"] == contents["pad_id"] == struct.pack("<i", sent)
    assert "stop_words_list" not in contents

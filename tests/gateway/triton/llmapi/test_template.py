"""`TextTemplate`, which finds the text of a response by comparison with a previous response."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2 as pb

from gateway.triton import bytes_tensor
from gateway.triton.llmapi.template import TextTemplate

FIRST = {"text_output": "a", "finish_reason": "None", "stop_reason": "None"}
# Sizes around which the protobuf length fields get longer
SIZES = st.integers(0, 300) | st.sampled_from([*range(16_000, 16_500, 17), 2**21, 2**21 + 5])


def response(outputs: dict[str, str], *, final: bool = False, error: str = "") -> bytes:
    message = pb.ModelStreamInferResponse(error_message=error)
    found = message.infer_response
    found.model_name, found.model_version, found.id = "tensorrt_llm", "1", "f" * 34
    found.parameters["triton_final_response"].bool_param = final
    for name, text in outputs.items():
        found.outputs.add(name=name, datatype="BYTES", shape=[1])
        found.raw_output_contents.append(bytes_tensor.pack([text]))
    return bytes(message.SerializeToString())


def template(outputs: dict[str, str]) -> TextTemplate:
    data = response(outputs)
    message = pb.ModelStreamInferResponse.FromString(data)
    found = TextTemplate.of(data, message.infer_response)
    assert found is not None
    return found


@given(SIZES, SIZES, st.permutations(sorted(FIRST)))
def test_a_text_of_any_length_is_found(first: int, other: int, order: list[str]) -> None:
    outputs = {name: FIRST[name] for name in order}
    like = template(outputs | {"text_output": "\u00e9" * first})
    data = response(outputs | {"text_output": "b" * other})
    place = like.text(data)
    assert place is not None
    assert data[slice(*place)] == b"b" * other


@pytest.mark.parametrize("near", [0, 2**7, 2**14, 2**21])
def test_a_text_is_found_where_lengths_take_a_byte_more(near: int) -> None:
    """The lengths of the text, its tensor and the response may each need one byte more."""
    found = template(FIRST)
    for size in range(max(near - 200, 0), near + 8):
        data = response(FIRST | {"text_output": "b" * size})
        place = found.text(data)
        assert place is not None
        assert (place[1] - place[0], data[place[0] : place[1]].count(b"b")) == (size, size)


@pytest.mark.parametrize(
    "data",
    [
        response(FIRST, final=True),
        response(FIRST, error="Request cancelled by client"),
        response(FIRST | {"finish_reason": "stop"}),
        response(FIRST | {"kv_cache_reused_block": "2"}),
        response({"text_output": "a"}),
        response({}),
        response(FIRST)[:-1],
        response(FIRST) + response(FIRST),
        b"",
        b"\x12\xff\xff\xff\xff\xff\xff",
    ],
)
def test_what_says_more_than_a_text_is_parsed(data: bytes) -> None:
    assert template(FIRST).text(data) is None


def test_a_length_that_is_wrong_is_no_text() -> None:
    data = bytearray(response(FIRST | {"text_output": "abcdef"}))
    at = data.index(b"abcdef") - 4
    data[at] = 5
    assert template(FIRST).text(bytes(data)) is None

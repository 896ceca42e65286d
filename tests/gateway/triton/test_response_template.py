"""Token ids read by comparison with a previous response, or left to the protobuf parser."""

from __future__ import annotations

import struct

from hypothesis import given
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2 as pb

from gateway.triton.response_template import ResponseTemplate

IDS = st.integers(-(2**31), 2**31 - 1)


def _response(ids: list[int], *, final: bool = False, reused: int | None = None) -> bytes:
    message = pb.ModelStreamInferResponse()
    response = message.infer_response
    response.model_name, response.id = "tensorrt_llm", "0123456789abcdef-0"
    response.parameters["triton_final_response"].bool_param = final
    tensors = [("output_ids", ids), ("sequence_length", [len(ids)])]
    if reused is not None:
        tensors.append(("kv_cache_reused_blocks", [reused]))
    for name, values in tensors:
        response.outputs.add(name=name, datatype="INT32", shape=(1, 1, len(values)))
        response.raw_output_contents.append(struct.pack(f"<{len(values)}i", *values))
    return message.SerializeToString(deterministic=True)


def _template(data: bytes) -> ResponseTemplate | None:
    return ResponseTemplate.of(data, pb.ModelStreamInferResponse.FromString(data).infer_response)


@given(IDS, IDS, st.none() | st.integers(0, 9))
def test_the_next_id_is_found(first: int, second: int, reused: int | None) -> None:
    template = _template(_response([first], reused=reused))
    assert template is not None
    assert template.token(_response([second], reused=reused)) == second


def test_statistics_may_change() -> None:
    """Changed statistics do not matter, and those of the first response count.

    Since v0.19 one of the statistics is the time of the last token.
    """
    template = _template(_response([7], reused=1))
    assert template is not None
    assert template.token(_response([8], reused=2)) == 8


def test_what_is_another_thing_is_parsed() -> None:
    template = _template(_response([7]))
    assert template is not None
    assert template.token(_response([7], final=True)) is None
    assert template.token(_response([7, 8])) is None
    assert template.token(_response([])) is None
    assert template.token(_response([7], reused=1)) is None
    empty = bytearray(_response([7]))
    empty[-4:] = bytes(4)  # the message contains an id, but its length is zero
    assert template.token(bytes(empty)) is None


@given(st.data())
def test_no_byte_can_change_unnoticed_but_those_of_the_id(data: st.DataObject) -> None:
    whole = _response([7])
    template = _template(whole)
    assert template is not None
    place = data.draw(st.integers(0, len(whole) - 1))
    changed = bytearray(whole)
    changed[place] ^= data.draw(st.integers(1, 255))
    at = whole.rindex(struct.pack("<i", 7))
    token = template.token(bytes(changed))
    assert (token is not None) == (at <= place < at + 4)


def test_only_one_id_of_one_beam_makes_a_template() -> None:
    assert _template(_response([])) is None
    assert _template(_response([1, 2])) is None
    message = pb.ModelStreamInferResponse.FromString(_response([1]))
    message.infer_response.outputs[1].name = "cum_log_probs"
    assert _template(message.SerializeToString()) is None

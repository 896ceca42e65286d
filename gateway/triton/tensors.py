"""ModelInferRequest and ModelStreamInferResponse for the core model, without numpy.

Tensor names, dtypes and shapes are those of `tensorrt_llm` in tensorrtllm_backend; all scalars
have shape [1, 1]. Raw contents are little-endian.
"""

from __future__ import annotations

import struct
from array import array

from tritonclient.grpc import service_pb2 as pb

from adapters.adapter import Converted, Dtype
from gateway.generation import Generation, TokenDelta
from gateway.triton.dialect import Dialect

_U64 = 0xFFFF_FFFF_FFFF_FFFF
_EMPTY_FINAL = "triton_enable_empty_final_response"
_FINAL = "triton_final_response"
_LORA_DATATYPES: dict[Dtype, str] = {"float16": "FP16", "bfloat16": "BF16"}
_PIECE = 1 << 20
# Field 7 of ModelInferRequest, length-delimited.
_RAW_INPUT_CONTENTS = bytes([7 << 3 | 2])


def generation_request(
    dialect: Dialect, generation: Generation, *, end_id: int | None
) -> pb.ModelInferRequest:
    """The streaming request for one generation.

    The engine is greedy when neither top-k nor top-p is given, so sampling over the whole
    distribution is asked for with top_p 1, and greedy with top_k 1 (a temperature of 0 alone
    samples at temperature 1 in some releases).
    """
    request = _request(dialect, generation.request_id)
    _add(request, "input_ids", "INT32", _int32(generation.prompt_ids), len(generation.prompt_ids))
    _add(request, "input_lengths", "INT32", _int32([len(generation.prompt_ids)]))
    _add(request, "request_output_len", "INT32", _int32([generation.max_tokens]))
    if end_id is not None:
        _add(request, "end_id", "INT32", _int32([end_id]))
        _add(request, "pad_id", "INT32", _int32([end_id]))
    if generation.stop_ids:
        words = word_list(generation.stop_ids)
        _add(request, "stop_words_list", "INT32", _int32(words), 2, len(words) // 2)
    _add(request, "streaming", "BOOL", b"\x01")
    sampling = generation.sampling
    _add(request, dialect.seed, "UINT64", struct.pack("<Q", sampling.seed & _U64))
    if sampling.greedy:
        _add(request, "runtime_top_k", "INT32", _int32([1]))
    else:
        _add(request, "runtime_top_k", "INT32", _int32([sampling.top_k]))
        _add(request, "runtime_top_p", "FP32", _fp32(sampling.top_p))
        _add(request, "temperature", "FP32", _fp32(sampling.temperature))
    if sampling.presence_penalty:
        _add(request, "presence_penalty", "FP32", _fp32(sampling.presence_penalty))
    if sampling.frequency_penalty:
        _add(request, "frequency_penalty", "FP32", _fp32(sampling.frequency_penalty))
    if generation.lora is not None:
        _add(request, "lora_task_id", "UINT64", struct.pack("<Q", generation.lora.task_id))
    request.outputs.add(name="output_ids")
    request.outputs.add(name="sequence_length")
    return request


def with_weights(request: pb.ModelInferRequest, lora: Converted) -> bytes:
    """The serialized request with `lora_config` and `lora_weights` appended.

    Serialized messages concatenate field by field, so the weights go behind a header of a few
    bytes as they are stored, without ever being a protobuf object. To be called in a thread: the
    weights are copied in pieces, since one copy of 132 MB would hold the GIL for 60 ms and more,
    and joining exact `bytes` releases it.
    """
    tail = pb.ModelInferRequest()
    _add(tail, "lora_config", "INT32", lora.config, lora.rows, 3)
    datatype = _LORA_DATATYPES[lora.dtype]
    tail.inputs.add(name="lora_weights", datatype=datatype, shape=(1, lora.rows, lora.width))
    weights = memoryview(lora.weights)
    pieces = [bytes(weights[i : i + _PIECE]) for i in range(0, lora.nbytes, _PIECE)]
    header = _RAW_INPUT_CONTENTS + _varint(lora.nbytes)
    return b"".join([request.SerializeToString(), tail.SerializeToString(), header, *pieces])


def stop_request(dialect: Dialect, request_id: str) -> pb.ModelInferRequest:
    """Asks the engine to stop the request with this id; answered with success if it is gone."""
    request = _request(dialect, request_id)
    _add(request, "input_ids", "INT32", _int32([0]))
    _add(request, "input_lengths", "INT32", _int32([0]))
    _add(request, "request_output_len", "INT32", _int32([0]))
    _add(request, "stop", "BOOL", b"\x01")
    return request


def word_list(words: tuple[tuple[int, ...], ...]) -> list[int]:
    """Stop words as the flattened [2, N] matrix: ids, then inclusive end offsets padded with -1."""
    ids = [token_id for word in words for token_id in word]
    offsets, end = [], 0
    for word in words:
        end += len(word)
        offsets.append(end)
    return ids + offsets + [-1] * (len(ids) - len(offsets))


def token_delta(response: pb.ModelInferResponse) -> TokenDelta:
    """New ids of one streamed response with one beam; none in a flags-only final."""
    final = response.parameters[_FINAL].bool_param if _FINAL in response.parameters else False
    ids: list[int] = []
    length: int | None = None
    for tensor, raw in zip(response.outputs, response.raw_output_contents, strict=True):
        if tensor.name == "output_ids":
            ids = array("i", raw).tolist()
        elif tensor.name == "sequence_length":
            length = array("i", raw)[0]
    return TokenDelta(ids if length is None else ids[:length], final)


def _request(dialect: Dialect, request_id: str) -> pb.ModelInferRequest:
    request = pb.ModelInferRequest(model_name=dialect.model, id=request_id)
    request.parameters[_EMPTY_FINAL].bool_param = True
    return request


def _add(request: pb.ModelInferRequest, name: str, datatype: str, raw: bytes, *dims: int) -> None:
    request.inputs.add(name=name, datatype=datatype, shape=(1, *(dims or (1,))))
    request.raw_input_contents.append(raw)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _int32(values: list[int]) -> bytes:
    return array("i", values).tobytes()


def _fp32(value: float) -> bytes:
    return struct.pack("<f", value)

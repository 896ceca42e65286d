"""ModelInferRequest and ModelStreamInferResponse for the core model, without numpy.

Tensor names, dtypes and shapes are those of `tensorrt_llm` in tensorrtllm_backend; all scalars
have shape [1, 1]. Raw contents are little-endian.
"""

from __future__ import annotations

import struct
from array import array

from tritonclient.grpc import service_pb2 as pb

from adapters.adapter import Converted, Dtype
from gateway.errors import EngineError
from gateway.generation import Generation, Sampling, TokenDelta, TokenLogprob
from gateway.triton.dialect import Dialect
from gateway.triton.logits import prompt_logprobs, top_logprobs

_U64 = 0xFFFF_FFFF_FFFF_FFFF
_TINY = 1e-6
_EMPTY_FINAL = "triton_enable_empty_final_response"
_FINAL = "triton_final_response"
_LORA_DATATYPES: dict[Dtype, str] = {"float16": "FP16", "bfloat16": "BF16"}
_PIECE = 1 << 20
# Field 7 of ModelInferRequest, length-delimited.
_RAW_INPUT_CONTENTS = bytes([7 << 3 | 2])


def generation_request(dialect: Dialect, generation: Generation) -> pb.ModelInferRequest:
    """The streaming request for one generation."""
    request = _request(dialect, generation.request_id)
    _add(request, "input_ids", "INT32", _int32(generation.prompt_ids), len(generation.prompt_ids))
    _add(request, "input_lengths", "INT32", _int32([len(generation.prompt_ids)]))
    _add(request, "request_output_len", "INT32", _int32([generation.max_tokens]))
    if generation.end_id is not None:
        _add(request, "end_id", "INT32", _int32([generation.end_id]))
        _add(request, "pad_id", "INT32", _int32([generation.end_id]))
    for name, sequences in (
        ("stop_words_list", generation.stop_ids),
        ("bad_words_list", generation.bad_ids),
    ):
        if sequences:
            words = word_list(sequences)
            _add(request, name, "INT32", _int32(words), 2, len(words) // 2)
    if generation.beams:
        _add(request, "beam_width", "INT32", _int32([generation.beams]))
        _add(request, "num_return_sequences", "INT32", _int32([generation.beams]))
        _add(request, "len_penalty", "FP32", _fp32(generation.length_penalty))
        _add(request, "exclude_input_in_output", "BOOL", b"\x01")
    else:
        _add(request, "streaming", "BOOL", b"\x01")
    _add_sampling(request, dialect, generation.sampling, logprobs=generation.logprobs is not None)
    if generation.guide is not None:
        _add(request, "guided_decoding_guide_type", "BYTES", _bytes(generation.guide.type))
        _add(request, "guided_decoding_guide", "BYTES", _bytes(generation.guide.text))
    if generation.lora is not None:
        _add(request, "lora_task_id", "UINT64", struct.pack("<Q", generation.lora.task_id))
    request.outputs.add(name="output_ids")
    request.outputs.add(name="sequence_length")
    if generation.logprobs is not None:
        _add(request, "return_log_probs", "BOOL", b"\x01")
        request.outputs.add(name="output_log_probs")
        if generation.logprobs:
            _add(request, "return_generation_logits", "BOOL", b"\x01")
            request.outputs.add(name="generation_logits")
    # Another output costs a microsecond for each token.
    if generation.usage and dialect.kv_stats is not None:
        _add(request, dialect.kv_stats, "BOOL", b"\x01")
        request.outputs.add(name="kv_cache_reused_blocks")
    return request


def beam_deltas(response: pb.ModelInferResponse) -> list[TokenDelta]:
    """The ids of each beam, best first, from the one response of a beam search."""
    ids, lengths = array("i"), array("i")
    for tensor, raw in zip(response.outputs, response.raw_output_contents, strict=True):
        if tensor.name == "output_ids":
            ids.frombytes(raw)
        elif tensor.name == "sequence_length":
            lengths.frombytes(raw)
    width = len(ids) // max(len(lengths), 1)
    return [
        TokenDelta(ids[beam * width : beam * width + length].tolist(), True)
        for beam, length in enumerate(lengths)
    ]


def context_request(dialect: Dialect, generation: Generation) -> pb.ModelInferRequest:
    """Asks for the logits of the prompt, in one response: streaming would repeat them each time."""
    request = _request(dialect, f"{generation.request_id}-context")
    _add(request, "input_ids", "INT32", _int32(generation.prompt_ids), len(generation.prompt_ids))
    _add(request, "input_lengths", "INT32", _int32([len(generation.prompt_ids)]))
    _add(request, "request_output_len", "INT32", _int32([1]))
    _add(request, "return_context_logits", "BOOL", b"\x01")
    if generation.lora is not None:
        _add(request, "lora_task_id", "UINT64", struct.pack("<Q", generation.lora.task_id))
    for name in ("output_ids", "sequence_length", "context_logits"):
        request.outputs.add(name=name)
    return request


def context_logprobs(response: pb.ModelInferResponse, generation: Generation) -> list[TokenLogprob]:
    """Log probabilities of the prompt's tokens. Takes time: to be called in a thread."""
    for tensor, raw in zip(response.outputs, response.raw_output_contents, strict=True):
        if tensor.name == "context_logits":
            count = generation.logprobs or 0
            return prompt_logprobs(raw, tensor.datatype, tensor.shape, generation.prompt_ids, count)
    raise EngineError("The engine gave no logits of the prompt.")


def _add_sampling(
    request: pb.ModelInferRequest, dialect: Dialect, sampling: Sampling, *, logprobs: bool
) -> None:
    """The engine is greedy when neither top-k nor top-p is given, so one of them always is.

    Top_p 1 samples over the whole distribution; greedy is top_k 1, since a temperature of 0 alone
    samples at temperature 1 in some releases. Log probabilities are normalised within the top k
    (so 0 for every greedy token) but not within top p: greedy is then a top p of almost nothing.
    """
    _add(request, dialect.seed, "UINT64", struct.pack("<Q", sampling.seed & _U64))
    if sampling.greedy and logprobs:
        _add(request, "runtime_top_k", "INT32", _int32([0]))
        _add(request, "runtime_top_p", "FP32", _fp32(_TINY))
    elif sampling.greedy:
        _add(request, "runtime_top_k", "INT32", _int32([1]))
    else:
        _add(request, "runtime_top_k", "INT32", _int32([sampling.top_k]))
        _add(request, "runtime_top_p", "FP32", _fp32(sampling.top_p))
        _add(request, "temperature", "FP32", _fp32(sampling.temperature))
    if sampling.repetition_penalty != 1.0:
        _add(request, "repetition_penalty", "FP32", _fp32(sampling.repetition_penalty))
    if sampling.min_tokens:
        _add(request, dialect.min_tokens, "INT32", _int32([sampling.min_tokens]))
    if sampling.logit_bias:
        bias = array("f", bytes(4 * dialect.vocab_size))
        for token_id, value in sampling.logit_bias:
            bias[token_id] = value
        _add(request, "embedding_bias", "FP32", bias.tobytes(), dialect.vocab_size)
    if sampling.presence_penalty:
        _add(request, "presence_penalty", "FP32", _fp32(sampling.presence_penalty))
    if sampling.frequency_penalty:
        _add(request, "frequency_penalty", "FP32", _fp32(sampling.frequency_penalty))


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


def is_final(response: pb.ModelInferResponse) -> bool:
    """Whether nothing more comes for this request."""
    return response.parameters[_FINAL].bool_param if _FINAL in response.parameters else False


def token_delta(response: pb.ModelInferResponse, generation: Generation) -> TokenDelta:
    """New ids of one streamed response with one beam; none in a flags-only final."""
    final = is_final(response)
    ids: list[int] = []
    length: int | None = None
    reused = 0
    values: list[float] = []
    top: list[list[tuple[int, float]]] = []
    for tensor, raw in zip(response.outputs, response.raw_output_contents, strict=True):
        if tensor.name == "output_ids":
            ids = array("i", raw).tolist()
        elif tensor.name == "sequence_length":
            length = array("i", raw)[0]
        elif tensor.name == "kv_cache_reused_blocks":
            reused = array("i", raw)[0]
        elif tensor.name == "output_log_probs":
            values = array("f", raw).tolist()
        elif tensor.name == "generation_logits" and generation.logprobs:
            sampling = generation.sampling
            count, temperature = generation.logprobs, sampling.temperature
            if sampling.greedy:
                temperature = 1.0  # none was sent
            top = top_logprobs(raw, tensor.datatype, tensor.shape, len(ids), count, temperature)
    if length is not None:
        ids = ids[:length]
    if generation.logprobs is None:
        return TokenDelta(ids, final, reused)
    # The engine repeats the log probabilities of all tokens so far: the last are the new ones.
    new = values[len(values) - len(ids) :]
    alternatives = top or [[]] * len(ids)
    entries = [
        TokenLogprob(token_id, value, tuple(others))
        for token_id, value, others in zip(ids, new, alternatives, strict=False)
    ]
    return TokenDelta(ids, final, reused, entries)


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


def _bytes(value: str) -> bytes:
    """One BYTES element: its length in 4 bytes, then the UTF-8 text."""
    raw = value.encode()
    return struct.pack("<I", len(raw)) + raw


def _fp32(value: float) -> bytes:
    return struct.pack("<f", value)

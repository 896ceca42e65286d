"""Encoding of requests to the core model, and decoding of its responses, without numpy.

Tensors have the shapes of the model `tensorrt_llm` in tensorrtllm_backend. All single numbers have
shape [1, 1]. Names and data types are those that the served model declares. Numbers are
little-endian.

See decision 034 in docs/decisions.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, chain

from adapters.adapter import Converted
from gateway.deltas import EngineStats, TokenDelta, TokenLogprob
from gateway.generation.engine_request import Generation
from gateway.triton.model_capabilities import ModelCapabilities, StopModel
from gateway.triton.names import LORA_DATATYPES, LogicalInput
from gateway.triton.protobuf import pb
from gateway.triton.request import InferRequest, RequestBuilder, RequestPart, varint
from gateway.triton.transport import Message

_TINY = 1e-6
_MAX_PARTS, _MAX_PART_BYTES = 64, 2048
_NEVER = -1
_FINAL = "triton_final_response"
# Output with one INT32, the number of reused KV-cache blocks, from which `EngineStats` is made.
_REUSED_BLOCKS = "kv_cache_reused_blocks"
# Inputs that a stop request needs besides `stop`. Without them, Triton refuses the request.
_NEEDED_TO_STOP: tuple[LogicalInput, ...] = ("prompt", "prompt_length", "max_tokens")
# Protobuf key of the length-delimited field 7 of ModelInferRequest, raw_input_contents.
_RAW_INPUT_CONTENTS = bytes([7 << 3 | 2])


def generation_request(capabilities: ModelCapabilities, generation: Generation) -> InferRequest:
    """Return the request for one generation. It asks for a stream if the model can stream."""
    build = _prompt_request(capabilities, generation, generation.request_id, generation.max_tokens)
    build.scalar("seed", generation.seed)
    build.add(_build_options(capabilities, generation))
    return build.request


def _build_options(capabilities: ModelCapabilities, generation: Generation) -> RequestPart:
    """Return the serialized inputs for the generation's options.

    The prompt, the maximum number of tokens and the seed differ between requests. The options are
    all other inputs. They are the same in most requests, so the result is cached.
    """
    params = generation.params
    if params.guide is not None or params.logit_bias:
        return _build_new_options(capabilities, generation)
    key = (
        *(generation.end_id, generation.stop_ids, generation.bad_ids, generation.beams),
        *(
            params.logprobs,
            params.length_penalty,
            params.usage,
            params.lora and params.lora.task_id,
        ),
        *(params.temperature, params.top_p, params.top_k, params.min_tokens),
        params.plain,
    )
    known = capabilities.parts
    part = known.get(key)
    if part is None:
        part = _build_new_options(capabilities, generation)
        # Limit the size of the cache, because clients choose the options.
        if part.nbytes <= _MAX_PART_BYTES:
            if len(known) >= _MAX_PARTS:
                known.clear()
            known[key] = part
    return part


def _build_new_options(capabilities: ModelCapabilities, generation: Generation) -> RequestPart:
    params = generation.params
    build = _builder(capabilities, "")
    end_id = generation.end_id
    if end_id is None and build.needs("end_id"):
        end_id = _NEVER
    if end_id is not None:
        build.scalar("end_id", end_id)
        build.scalar("pad_id", end_id)
    words: tuple[tuple[LogicalInput, tuple[tuple[int, ...], ...]], ...] = (
        ("stop_words", generation.stop_ids),
        ("bad_words", generation.bad_ids),
    )
    for logical, sequences in words:
        # Leave out inputs that the model does not have. The GPT repository's model takes no stop
        # words, so the gateway truncates its answers (`_cut_at_end`).
        if sequences and build.has(logical):
            ids = word_list(sequences)
            build.int32s(logical, ids, 2, len(ids) // 2)
    add_sampling(build, generation, logprobs=params.logprobs is not None)
    add_common(build, capabilities, generation)
    build.output("output_ids")
    if "sequence_length" in capabilities.outputs:
        build.output("sequence_length")
    if params.logprobs is not None:
        build.scalar("log_probs", True)
        build.output("output_log_probs")
        if params.logprobs:
            build.scalar("generation_logits", True)
            build.output("generation_logits")
    if params.logit_bias:
        vocab_size = capabilities.vocab_size
        build.raw("bias", _bias(params.logit_bias, vocab_size), vocab_size)
    return build.part


# Cache the result, because a request may have 128 choices with the same bias. For a usual
# vocabulary, one result takes half a megabyte.
@lru_cache(maxsize=4)
def _bias(pairs: tuple[tuple[int, float], ...], vocab_size: int) -> bytes:
    """Return one FP32 value for each token of the vocabulary: the token's bias, or 0."""
    bias = array("f", bytes(4 * vocab_size))
    for token_id, value in pairs:
        bias[token_id] = value
    return bias.tobytes()


def add_common(
    build: RequestBuilder, capabilities: ModelCapabilities, generation: Generation
) -> None:
    """Add the inputs that core models and text models have in common.

    These are the inputs for streaming, beam search, guided decoding, LoRA adapters and statistics.
    """
    params = generation.params
    if generation.beams:
        build.scalar("beam_width", generation.beams)
        if build.has("sequences"):  # without this input, the model always returns all beams
            build.scalar("sequences", generation.beams)
        build.scalar("length_penalty", params.length_penalty)
    single = generation.beams or (generation.text is not None and generation.text.single_response)
    if capabilities.decoupled and not single:
        build.scalar("streaming", True)
    elif build.has("exclude_prompt"):
        build.scalar("exclude_prompt", True)
    if params.guide is not None:
        build.texts("guide_type", [params.guide.type])
        build.texts("guide", [params.guide.text])
    if params.lora is not None:
        build.scalar("lora_task_id", params.lora.task_id)
    # Request the statistics only if they are used: an additional output takes 1 us per token.
    if params.usage and build.has("cache_stats"):
        build.scalar("cache_stats", True)
        build.output(_REUSED_BLOCKS)


def engine_stats(
    response: pb.ModelInferResponse, capabilities: ModelCapabilities
) -> EngineStats | None:
    """Return the statistics in a response.

    Return None if the response has no statistics, or if the number of reused blocks is 0. Before
    the engine has started the request, it also reports 0, so a later response may have another
    number.
    """
    for tensor, raw in zip(response.outputs, response.raw_output_contents, strict=True):
        if tensor.name == _REUSED_BLOCKS and (blocks := array("i", raw)[0]):
            return EngineStats(reused_tokens=blocks * capabilities.tokens_per_block)
    return None


def beam_deltas(
    response: pb.ModelInferResponse, capabilities: ModelCapabilities, generation: Generation
) -> list[TokenDelta]:
    """Return a `TokenDelta` with token ids for each beam, the best beam first.

    `response` is the only response of a beam search.
    """
    ids, lengths = array("i"), array("i")
    for tensor, raw in zip(response.outputs, response.raw_output_contents, strict=True):
        if tensor.name == "output_ids":
            ids.frombytes(raw)
        elif tensor.name == "sequence_length":
            lengths.frombytes(raw)
    width = len(ids) // max(len(lengths), 1)
    prompt = _count_restated(capabilities, generation)
    return [
        TokenDelta(ids[beam * width + prompt : beam * width + length].tolist(), True)
        for beam, length in enumerate(lengths)
    ]


def context_request(capabilities: ModelCapabilities, generation: Generation) -> InferRequest:
    """Return a request for the logits of the prompt. The engine also generates one token.

    The request is non-streaming, because each streamed response would repeat the logits.
    """
    build = _prompt_request(capabilities, generation, f"{generation.request_id}-context", 1)
    build.scalar("context_logits", True)
    if generation.params.lora is not None:
        build.scalar("lora_task_id", generation.params.lora.task_id)
    for name in ("output_ids", "sequence_length", "context_logits"):
        build.output(name)
    return build.request


def add_sampling(build: RequestBuilder, generation: Generation, *, logprobs: bool = False) -> None:
    """Add the inputs for sampling.

    If neither top_k nor top_p were sent, the engine would decode greedily, so at least one of them
    is always sent. A top_p of 1 samples from the complete distribution.

    Greedy decoding is sent as a top_k of 1. A temperature of 0 alone would not suffice, because
    some releases then sample at temperature 1.

    If `logprobs` is True, greedy decoding is sent as a top_p of almost 0 instead. With a top_k of
    1, all log probabilities would be 0, because the engine normalises log probabilities within the
    top k tokens. The engine does not normalise them within the top p tokens.
    """
    params = generation.params
    if params.greedy and logprobs:
        build.scalar("top_k", 0)
        build.scalar("top_p", _TINY)
    elif params.greedy:
        build.scalar("top_k", 1)
    else:
        build.scalar("top_k", params.top_k)
        build.scalar("top_p", params.top_p)
        build.scalar("temperature", params.temperature)
    if params.min_tokens:
        build.scalar("min_tokens", params.min_tokens)
    for name, value in params.plain:
        build.scalar(name, value)


def append_weights(request: InferRequest, lora: Converted) -> Message:
    """Return the serialized request with `lora_config` and `lora_weights` appended, in chunks.

    Serialized protobuf fields can be concatenated. So the stored weights are appended after a
    header of a few bytes, without copying them and without building a protobuf object.
    """
    tail = pb.ModelInferRequest()
    tail.inputs.add(name="lora_config", datatype="INT32", shape=(1, lora.rows, 3))
    tail.raw_input_contents.append(lora.config)
    datatype = LORA_DATATYPES[lora.dtype]
    tail.inputs.add(name="lora_weights", datatype=datatype, shape=(1, lora.rows, lora.width))
    header = _RAW_INPUT_CONTENTS + varint(lora.nbytes)
    return [*request.pieces, tail.SerializeToString() + header, memoryview(lora.weights)]


def stop_request(model: StopModel, request_id: str) -> InferRequest:
    """Return a stop request for the request with this id.

    The stop request succeeds even if the request with this id has ended or is unknown.
    """
    build = RequestBuilder(model.name, model.inputs, request_id)
    for logical in _NEEDED_TO_STOP:
        build.scalar(logical, 0)
    build.scalar("stop", True)
    return build.request


# Cache the result, because a request may have 128 choices with the same stop words. One result may
# take half a megabyte.
@lru_cache(maxsize=2)
def word_list(words: tuple[tuple[int, ...], ...]) -> array[int]:
    """Return stop words or bad words as the engine's [2, N] matrix, flattened row by row.

    The first row has the token ids of all words, one word after the other. The second row has the
    end of each word (the index after its last id), padded with -1. Do not modify the result,
    because it is cached.
    """
    ids = array("i", chain.from_iterable(words))
    offsets = array("i", accumulate(map(len, words)))
    return ids + offsets + array("i", [-1]) * (len(ids) - len(offsets))


def is_final(response: pb.ModelInferResponse) -> bool:
    """Return True if the response is marked as the last response to its request."""
    return response.parameters[_FINAL].bool_param if _FINAL in response.parameters else False


def token_delta(
    response: pb.ModelInferResponse, capabilities: ModelCapabilities, generation: Generation
) -> TokenDelta:
    """Return the new tokens in a response with one beam, as a `TokenDelta`.

    A response without outputs results in a delta without token ids. Outputs that were not requested
    are ignored, because releases v0.10 to v0.13 send zeros in them.
    """
    final = is_final(response) or not capabilities.decoupled
    ids: list[int] = []
    length: int | None = None
    values: list[float] = []
    logits: tuple[bytes, str, Sequence[int]] | None = None
    for tensor, raw in zip(response.outputs, response.raw_output_contents, strict=True):
        if tensor.name == "output_ids":
            ids = array("i", raw).tolist()
        elif tensor.name == "sequence_length":
            length = array("i", raw)[0]
        elif tensor.name == "output_log_probs":
            values = array("f", raw).tolist()
        elif tensor.name == "generation_logits" and generation.params.logprobs:
            logits = raw, tensor.datatype, tensor.shape
    if length is not None:
        ids = ids[:length]
    if not capabilities.decoupled:
        ids = ids[_count_restated(capabilities, generation) :]
        if length is None:
            ids = _cut_at_end(ids, generation)
    stats = engine_stats(response, capabilities) if generation.params.usage else None
    if generation.params.logprobs is None:
        return TokenDelta(ids, final, stats)
    if logits is not None:
        return TokenDelta(ids, final, stats, _logprobs_from_logits(*logits, ids, generation))
    # Use only the last log probabilities: each response has those of all tokens so far.
    new = values[len(values) - len(ids) :]
    entries = [TokenLogprob(token_id, value) for token_id, value in zip(ids, new, strict=False)]
    return TokenDelta(ids, final, stats, entries)


def _logprobs_from_logits(
    raw: bytes, datatype: str, shape: Sequence[int], ids: list[int], generation: Generation
) -> list[TokenLogprob]:
    # Import numpy (20 MiB) only here, where it is needed. This function runs in the thread for
    # logits, so the import does not block the event loop.
    from gateway.triton.logits import generated_logprobs  # noqa: PLC0415

    params = generation.params
    temperature = 1.0 if params.greedy else params.temperature  # not sent for greedy decoding
    count = generation.params.logprobs or 0
    return generated_logprobs(raw, datatype, shape, ids, count, temperature)


def _builder(capabilities: ModelCapabilities, request_id: str) -> RequestBuilder:
    return RequestBuilder(
        *(capabilities.model, capabilities.inputs, request_id),
        names_outputs=capabilities.names_outputs,
    )


def _prompt_request(
    capabilities: ModelCapabilities, generation: Generation, request_id: str, max_tokens: int
) -> RequestBuilder:
    build = _builder(capabilities, request_id)
    build.int32s("prompt", generation.prompt_ids, len(generation.prompt_ids))
    build.scalar("prompt_length", len(generation.prompt_ids))
    build.scalar("max_tokens", max_tokens)
    return build


def _cut_at_end(ids: list[int], generation: Generation) -> list[int]:
    """Return the token ids of an answer up to its first stop word or end-of-sequence id.

    The answers of the GPT repository's model need this, because the model takes no stop words and
    pads its answers. As in the answers of other models, the result includes the stop word but not
    the end-of-sequence id.
    """
    for count, token_id in enumerate(ids):
        if token_id == generation.end_id:
            return ids[:count]
        for word in generation.stop_ids:
            if (
                token_id == word[-1]
                and tuple(ids[max(count + 1 - len(word), 0) : count + 1]) == word
            ):
                return ids[: count + 1]
    return ids


def _count_restated(capabilities: ModelCapabilities, generation: Generation) -> int:
    """Return the number of prompt ids that a non-streaming response repeats at its beginning."""
    return len(generation.prompt_ids) if capabilities.restates_prompt else 0

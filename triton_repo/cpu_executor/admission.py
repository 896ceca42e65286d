"""Validation of a request when the executor's loop fetches it from the queue.

The validation also limits the request's output length to what the engine allows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from triton_repo.cpu_executor.active import ActiveRequest
from triton_repo.cpu_executor.checks import PREFIX
from triton_repo.cpu_executor.engine import CpuEngineConfig
from triton_repo.cpu_executor.engine_dtype import has_engine_dtype, to_float32
from triton_repo.cpu_executor.enums import RequestType
from triton_repo.cpu_executor.mailbox import Queued
from triton_repo.cpu_executor.request import Request

FETCH_ERROR = "Encountered an error when fetching new request: "
# Prefix of errors that TensorRT-LLM detects only during a step. In TensorRT-LLM such an error ends
# all active requests. Here it ends only the request that has the invalid value.
STEP_ERROR = "Encountered an error in forwardAsync function: "

# Fields of a request that the CPU executor refuses, because it lacks the model types and decoding
# modes for which these fields exist.
_UNSUPPORTED = (
    "position_ids",
    "mrope_config",
    "lookahead_config",
    "eagle_config",
    "context_phase_params",
    "logits_post_processor_name",
    "encoder_input_token_ids",
    "encoder_input_features",
    "encoder_output_length",
    "cross_attention_mask",
    "skip_cross_attn_blocks",
)


class RefusedError(Exception):
    """A fetched request cannot run. The message is the error text of the response."""


@dataclass(frozen=True)
class AdmissionLimits:
    """Limits of a request's size, from the engine and the executor's settings.

    Lengths are in tokens.
    """

    max_input_len: int
    max_seq_len: int
    max_beam_width: int
    max_batch_size: int
    max_blocks: int
    tokens_per_block: int
    block_reuse: bool = False
    # True for the policy MAX_UTILIZATION without context chunking. This policy may pause a request.
    # The paused request starts again with a longer prompt, to which its generated tokens were
    # added. A streaming request is refused if the longer prompt could exceed `max_input_len`.
    unchunked_max_utilization: bool = False


def refuse(what: str) -> RefusedError:
    return RefusedError(FETCH_ERROR + PREFIX + what)


def admit(entry: Queued, config: CpuEngineConfig, limits: AdmissionLimits) -> ActiveRequest:
    """Validate a queued request, and return it as an ``ActiveRequest``.

    Raises ``RefusedError``, with TensorRT-LLM's message, if the request cannot run.
    """
    request = entry.request
    _check_supported(request)
    _check_ranges(request, config, limits)
    draft = _draft_tokens(request, config, limits)
    prompt_table = _prompt_table(request, config, limits)
    # Limit the output: prompt and output together must not exceed max_seq_len. Reserve space for
    # the draft tokens of one step, even if this request has no draft tokens.
    room = limits.max_seq_len - len(request.input_token_ids) - (len(draft) or config.max_draft_len)
    active = ActiveRequest(entry, min(request.max_tokens, room), draft, prompt_table)
    _check_capacity(active, limits)
    return active


def _check_supported(request: Request) -> None:
    for name in _UNSUPPORTED:
        if getattr(request, name) is not None:
            raise refuse(f"{name} is not supported by the CPU executor")
    if request.request_type != RequestType.REQUEST_TYPE_CONTEXT_AND_GENERATION:
        raise refuse(f"{request.request_type.name} is not supported by the CPU executor")
    if request.output_config.return_encoder_output:
        raise refuse("return_encoder_output is not supported by the CPU executor")


def _check_ranges(request: Request, config: CpuEngineConfig, limits: AdmissionLimits) -> None:
    length = len(request.input_token_ids)
    longest = min(limits.max_input_len, limits.max_seq_len - 1)
    if length > longest:
        raise refuse(
            f"Prompt length ({length}) exceeds maximum input length ({longest}). Set log level "
            "to info and check TRTGptModel logs for how maximum input length is set"
        )
    end_id = request.end_id
    if end_id is not None and not -1 <= end_id < config.vocab_size:
        raise refuse(f"EndId ({end_id}) is not within acceptable range [-1, {config.vocab_size}).")
    output = request.output_config
    if output.return_context_logits and not config.gather_context_logits:
        raise refuse("Return context logit need to build engine with gather_context_logits")
    if output.return_generation_logits and not config.gather_generation_logits:
        raise refuse(
            "To return generation logits, gather_generation_logits must be enabled in "
            "ExecutorConfig"
        )
    sampling = request.sampling_config
    if sampling.beam_width > limits.max_beam_width:
        raise refuse(
            f"Requested beam width {sampling.beam_width} is larger than the maximum beam width "
            f"{limits.max_beam_width}"
        )
    bias = request.embedding_bias
    if bias is not None and len(bias) != config.vocab_size:
        raise RefusedError(
            f"{STEP_ERROR}{PREFIX}The embedding bias shape is "
            "not as expected. Expected last dimension to be same as vocab size: "
            f"{config.vocab_size}."
        )
    # Check top_p_min and no_repeat_ngram_size here: TensorRT-LLM's constructor accepts 0, and
    # TensorRT-LLM refuses this value only when it fetches the request.
    if sampling.top_p_min == 0 or sampling.no_repeat_ngram_size == 0:
        raise refuse("Incorrect sampling config")


def _draft_tokens(request: Request, config: CpuEngineConfig, limits: AdmissionLimits) -> list[int]:
    """Return the draft tokens of a request that the executor must verify.

    If prompt and draft tokens together exceed ``max_input_len``, the last draft tokens are omitted.
    """
    given = request.external_draft_tokens_config
    if given is None:
        return []
    if len(given.tokens) > config.max_draft_len:
        raise refuse(
            f"Draft tokens length ({len(given.tokens)}) exceeds maximum draft tokens length "
            f"({config.max_draft_len})."
        )
    if given.logits is not None or given.fast_logits:
        raise refuse("draft logits are not supported by the CPU executor")
    if request.sampling_config.beam_width > 1:
        raise refuse("draft tokens with beam search are not supported by the CPU executor")
    tokens: list[int] = given.tokens[: max(0, limits.max_input_len - len(request.input_token_ids))]
    return tokens


def _prompt_table(
    request: Request, config: CpuEngineConfig, limits: AdmissionLimits
) -> NDArray[np.float32] | None:
    """Return the request's prompt table as float32 ``[rows, hidden]``; None without a table.

    Row i of the table is the embedding of the token id ``vocab_size + i`` in the prompt.
    """
    given = request.prompt_tuning_config
    if given is None:
        return None
    if limits.block_reuse:
        extra = given.input_token_extra_ids
        if not extra:
            raise refuse(
                "Input token extra ids must be provided when enabling kv cache reuse with prompt "
                "table"
            )
        if len(extra) != len(request.input_token_ids):
            raise refuse(
                f"inputTokenExtraIds vector size ({len(extra)}) must be the same as input token "
                f"vector size ({len(request.input_token_ids)})."
            )
    rows, hidden = given.embedding_table.shape
    largest = config.max_prompt_embedding_table_size // config.max_batch_size
    if rows > largest:
        raise RefusedError(
            f"{STEP_ERROR}Prompt vocab size{rows} is larger "
            f"than max prompt vocab size of {largest}. Max prompt vocab size is computed from "
            "max_prompt_embedding_table_size / max_batch_size. "
        )
    if not has_engine_dtype(config, given.embedding_table):
        raise RefusedError(
            f"{STEP_ERROR}Request embedding table data type doesn't match model weight data type."
        )
    if hidden != config.hidden_size:
        raise refuse(f"the prompt table is {hidden} wide, the model {config.hidden_size}")
    return to_float32(config, given.embedding_table)


def _check_capacity(active: ActiveRequest, limits: AdmissionLimits) -> None:
    count = len(active.sequences)
    if active.beam_width == 1 and count > limits.max_batch_size:
        raise refuse(
            f"numReturnSequences ({count}) exceeds the maximum batch size ({limits.max_batch_size})"
        )
    tokens = len(active.prompt) + active.max_tokens
    needed = count * -(-tokens // limits.tokens_per_block)
    if needed > limits.max_blocks:
        raise refuse(
            f"the request needs {needed} KV cache blocks, the cache has {limits.max_blocks}"
        )
    if limits.unchunked_max_utilization and active.streaming and tokens - 1 > limits.max_input_len:
        raise refuse(
            "Request sequence length is potentially greater than max input length. This cannot "
            "be run unless streaming is disabled, context chunking is enabled or the "
            "GUARANTEED_NO_EVICT scheduling policy is used"
        )

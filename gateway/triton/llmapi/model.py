"""Recognition and capabilities of the llmapi repository's model.

The model is recognised by its tensors. It has no engine config.json from which its limits could be
read, so the limits come from the gateway's settings.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from gateway.errors import EngineUnavailable
from gateway.triton.model_capabilities import (
    LlmapiModel,
    ModelCapabilities,
    StopModel,
    TextModel,
    flag,
)
from gateway.triton.names import LLMAPI, LogicalInput, names_outputs, read_inputs

# A model with all of these inputs is the llmapi model. No model of inflight_batcher_llm has them
# all.
_MARKS = frozenset({"text_input", "sampling_param_max_tokens", "streaming"})
_OTHERS = frozenset({"input_ids", "request_output_len"})
# Inputs that the model must have. For example, if `exclude_prompt` was missing, the answer would
# contain the prompt. If `max_tokens` was missing, the answer would end after 32 tokens.
_NEEDED: tuple[LogicalInput, ...] = ("prompt", "max_tokens", "seed", "exclude_prompt")
# Input by which releases that stream token by token are recognised. Older releases do not have it.
_SINCE_STREAMING = "lora_id"
# Parameter that only the llmapi model in this project's repository declares. NVIDIA's llmapi model
# does not have it. See `LlmapiModel.polls_ended`.
_POLLS_ENDED = "polls_ended_requests"


def is_llmapi(config: Any) -> bool:
    """Return True if an `inference.ModelConfig` belongs to the llmapi model, of any release."""
    names = {tensor.name for tensor in config.input}
    return config.backend == "python" and names >= _MARKS and names.isdisjoint(_OTHERS)


def streams_tokens(config: Any) -> bool:
    """Return True if the release of an llmapi model streams token by token."""
    return any(tensor.name == _SINCE_STREAMING for tensor in config.input)


def read_llmapi_capabilities(
    model: str,
    config: Any,
    *,
    max_seq_len: int | None,
    vocab_size: int,
    tokens_per_block: int,
) -> ModelCapabilities:
    """Return the capabilities of the llmapi repository's model.

    Raise EngineUnavailable in three cases: an input is missing, `max_seq_len` is None, or the
    configuration turns on batching. The model's code does not support batching.
    """
    inputs = read_inputs(config, LLMAPI)
    missing = ["/".join(LLMAPI[logical]) for logical in _NEEDED if logical not in inputs]
    if missing:
        raise EngineUnavailable(f"Triton model {model!r} has no input {', '.join(missing)}.")
    if config.max_batch_size:
        raise EngineUnavailable(
            f"Triton model {model!r} has max_batch_size {config.max_batch_size}; the llmapi "
            "repository's model works with 0 alone."
        )
    if max_seq_len is None:
        raise EngineUnavailable(
            "The engine's length limit is unknown: no tensor of the llmapi repository reports it, "
            "so set GATEWAY_MAX_SEQ_LEN to max_seq_len of its model.yaml."
        )
    digest = hashlib.sha256(config.SerializeToString(deterministic=True)).hexdigest()
    return ModelCapabilities(
        model=model,
        inputs=inputs,
        outputs=frozenset(tensor.name for tensor in config.output),
        names_outputs=names_outputs(config),
        # Use the default values of `TextModel` for special tokens, because the model's
        # configuration does not report them.
        text=TextModel(accumulates=True, prefers_single_response=True, token_by_token=False),
        llmapi=LlmapiModel(
            streams=streams_tokens(config), polls_ended=flag(config, _POLLS_ENDED, default=True)
        ),
        decoupled=bool(config.model_transaction_policy.decoupled),
        restates_prompt=False,
        # In release 0.19, the model has no input `stop`. Its requests are stopped by cancelling the
        # call, because the model checks if the call was cancelled.
        stop=StopModel(model, inputs) if "stop" in inputs else None,
        passes_cancellation=True,
        max_batch_size=None,
        max_seq_len=max_seq_len,
        max_input_len=None,
        engine_dir=Path(),
        lora_dtype=None,
        lora_host_bytes=0,
        guides=None,
        max_beam_width=1,
        generation_logits=False,
        context_logits=False,
        logit_bytes=4,
        tokens_per_block=tokens_per_block,
        fingerprint=f"fp_{digest[:12]}",
        vocab_size=vocab_size,
    )

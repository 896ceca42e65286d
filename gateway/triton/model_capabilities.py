"""Capabilities of the selected model: its tensors, limits and features.

Names and types of tensors differ between releases, so they are read from Triton's ModelConfig.
Limits are read from the engine's config.json if its folder is readable.

See decision 062 in docs/decisions.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Hashable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from adapters.adapter import Dtype
from adapters.config_json import ConfigError, ConfigMissing
from adapters.engine_config import EngineConfig, read_engine_config
from gateway.errors import EngineUnavailable
from gateway.generation.engine_request import TextPrompt
from gateway.triton.names import (
    CORE,
    TEXT,
    Inputs,
    LogicalInput,
    lora_dtype,
    names_outputs,
    read_inputs,
)
from gateway.triton.protobuf import model_config_pb2
from gateway.triton.request import RequestPart
from guides.kinds import Backend

log = logging.getLogger(__name__)

Mode = Literal["token", "text", "llmapi"]

_DEFAULT_BLOCK = 64
_DEFAULT_LORA_HOST_BYTES = 1024**3
_NEEDED: dict[Mode, tuple[LogicalInput, ...]] = {
    "token": ("prompt", "prompt_length", "max_tokens", "seed"),
    "text": ("prompt", "max_tokens", "seed"),
}
_NAMES = {"token": CORE, "text": TEXT}
# Parameter with the interval at which a model checks if its gRPC call was cancelled. A model that
# declares this parameter stops the request when the call is cancelled. The parameter is declared by
# the core models of all releases, and by this project's own BLS model and GPT core model.
_CANCELLATION_PERIOD = "cancellation_check_period_ms"
# Inputs for words, which the preprocessing model of an ensemble converts to token ids.
_WORD_INPUTS: tuple[LogicalInput, ...] = ("stop_words", "bad_words", "bias")
_ADAPTER_BY_PATH: frozenset[LogicalInput] = frozenset({"lora_id", "lora_name", "lora_path"})
# Values of boolean parameters that NVIDIA's models accept, in upper or lower case. Tests compare
# them with `triton_repo.booleans`.
_CORE_TRUE = ("true", "1")
_TRUE, _FALSE = (*_CORE_TRUE, "t", "yes", "y"), ("false", "0", "f", "no", "n")
_SPECULATIVE = ("medusa", "redrafter", "lookahead", "eagle")


@dataclass(frozen=True, slots=True)
class TextModel:
    """Features of a model that takes and returns text instead of token ids.

    Attributes:
        adds_special_tokens: True if Triton's preprocessing adds special tokens to a prompt.
        skips_special_tokens: True if Triton's postprocessing removes special tokens from an answer.
        accumulates: True if each streamed response has the complete text so far. Otherwise, the
            tokens of each response are decoded separately.
        prefers_single_response: True if only clients that stream should get a streamed answer,
            because a streamed answer may have broken characters or may crash Triton (see
            `LlmapiModel`).
        token_by_token: True if a streamed response is always one token.
        loses_lora: True if the model passes `lora_task_id` to the engine in a wrong shape, so that
            adapters cannot be used.
    """

    adds_special_tokens: bool = True
    skips_special_tokens: bool = True
    accumulates: bool = False
    prefers_single_response: bool = False
    token_by_token: bool = True
    loses_lora: bool = False


@dataclass(frozen=True, slots=True)
class LlmapiModel:
    """Features that only the llmapi repository's model has. `TextModel` has its other features.

    Attributes:
        streams: True if the model sends a streamed answer token by token. Releases without support
            for adapters (TensorRT-LLM 1.2) send the complete answer when it ends.
        polls_ended: True if the model may check for a cancellation after the final response to a
            streamed request. NVIDIA's model does this check, and it crashes Triton 2.51.
    """

    streams: bool = True
    polls_ended: bool = True


@dataclass(frozen=True, slots=True)
class StopModel:
    """Name in Triton and inputs of the model to which stop requests are sent."""

    name: str
    inputs: Inputs


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCapabilities:
    """Capabilities of one model.

    Attributes:
        inputs, outputs: the tensors that the model declares.
        names_outputs: True if requests should name the outputs that they need (see
            `names.names_outputs`).
        text: features of a text model; None for the core model, which takes and returns token ids.
        llmapi: further features of the llmapi repository's model; None for all other models.
        decoupled: True if a request may have several responses. Otherwise it has one response and
            cannot stream.
        restates_prompt: True if a non-streaming response begins with the prompt.
        stop: the model that takes stop requests for this model; None if there is no such model.
        passes_cancellation: True if cancelling the call is known to stop the generation. Always
            False for models that take stop requests.
        max_batch_size: maximum number of sequences that the engine generates at the same time; None
            if unknown.
        max_seq_len, max_input_len: limits in tokens.
        engine_dir: the engine's folder on Triton's machine.
        lora_dtype: data type of the input `lora_weights`; None if the model takes no adapter
            weights.
        lora_tp_size: the engine's tp_size; None if the model takes no adapter weights, or if the
            engine's config.json is not readable.
        lora_host_bytes: size in bytes of the adapter cache in host memory, for each tensor parallel
            rank.
        guides: backend of guided decoding; None if guided decoding is not configured.
        vocab_size: number of logits for one token.
        generation_logits, context_logits: True if the engine can return the logits of generated
            tokens, or of the prompt.
        logit_bytes: size in bytes of one logit of a prompt.
        tokens_per_block: number of tokens in one KV-cache block.
        fingerprint: id that changes with the model's configuration.
    """

    model: str
    inputs: Inputs
    outputs: frozenset[str]
    names_outputs: bool
    text: TextModel | None
    decoupled: bool
    restates_prompt: bool
    stop: StopModel | None
    passes_cancellation: bool
    max_batch_size: int | None
    max_seq_len: int
    max_input_len: int | None
    engine_dir: Path
    lora_dtype: Dtype | None
    lora_host_bytes: int
    guides: Backend | None
    max_beam_width: int
    generation_logits: bool
    context_logits: bool
    logit_bytes: int
    tokens_per_block: int
    fingerprint: str
    vocab_size: int
    llmapi: LlmapiModel | None = None
    lora_tp_size: int | None = None
    engine_problem: str = field(default="", compare=False)
    """Error of reading the engine's config.json; "" if there was no error."""
    parts: dict[Hashable, RequestPart] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    """Cache of serialized parts of requests to the model. `tensors` fills it and defines its keys.
    """

    @property
    def mode(self) -> Mode:
        if self.llmapi is not None:
            return "llmapi"
        return "token" if self.text is None else "text"

    @property
    def reads_adapters(self) -> bool:
        """True if the engine reads adapters from its own disk, using the path in the request."""
        return self.llmapi is not None and self.inputs.keys() >= _ADAPTER_BY_PATH

    def takes_weights(self, dtype: Dtype | None, tp_size: int | None) -> bool:
        """Return True if adapter weights of this data type and tp_size fit the engine.

        An argument is None if its value is unknown. Unknown values count as fitting. If the
        engine's own tp_size is unknown, any `tp_size` counts as fitting.
        """
        return dtype in (None, self.lora_dtype) and (
            tp_size is None or self.lora_tp_size in (None, tp_size)
        )

    @property
    def max_lora_bytes(self) -> int | None:
        """Maximum size of one adapter's weights: total bytes of the adapter caches of all ranks.

        None if `lora_tp_size` is None.
        """
        return None if self.lora_tp_size is None else self.lora_host_bytes * self.lora_tp_size

    @property
    def streams_llmapi(self) -> bool:
        """True if this is an llmapi model that streams token by token."""
        return self.decoupled and self.llmapi is not None and self.llmapi.streams

    def answers_once(self, text: TextPrompt | None) -> bool:
        """Return True if a request gets its complete answer in one response.

        `text` is the request's text prompt; None if token ids are sent.
        """
        if not self.decoupled or (text is not None and text.single_response):
            return True
        return self.llmapi is not None and not self.llmapi.streams

    @property
    def stoppable(self) -> bool:
        """True if the engine can be asked to stop a request early."""
        return self.stop is not None or self.passes_cancellation


def read_capabilities(
    model: str, config: Any, *, max_seq_len: int | None, vocab_size: int
) -> ModelCapabilities:
    """Return the capabilities of a core model, from its `inference.ModelConfig`.

    `max_seq_len` and `vocab_size` are used if the engine's config.json is not readable.

    Raise EngineUnavailable in three cases: the model lacks a necessary tensor, the model belongs to
    the llmapi repository, or neither the engine's config.json nor `max_seq_len` states a length
    limit.
    """
    stop = stop_model(model, config)
    return _build_capabilities(
        model, config, config, None, stop, max_seq_len=max_seq_len, vocab_size=vocab_size
    )


def stop_model(model: str, config: Any) -> StopModel | None:
    """Return the core model as a `StopModel`. Return None if it does not support stop requests."""
    inputs = read_inputs(config, CORE)
    return StopModel(model, inputs) if "stop" in inputs else None


def engine_folder(core: Any) -> str:
    """Return the path of a core model's engine on Triton's machine; "" if it is not configured.

    In the GPT repository, the parameter is called `engine_dir` instead of `gpt_model_path`.
    """
    return parameter(core, "gpt_model_path") or parameter(core, "engine_dir")


def read_text_capabilities(
    model: str,
    config: Any,
    core: Any | None,
    text: TextModel,
    *,
    stop: StopModel | None,
    max_seq_len: int | None,
    vocab_size: int,
) -> ModelCapabilities:
    """Return the capabilities of a text model, from its `inference.ModelConfig`.

    `core` is the ModelConfig of the core model that the text model calls; None if it cannot be
    read. Raise EngineUnavailable for the same reasons as `read_capabilities`. Also raise
    EngineUnavailable if it is unknown whether the model repeats the prompt in a non-streaming
    answer.
    """
    capabilities = _build_capabilities(
        model, config, core, text, stop, max_seq_len=max_seq_len, vocab_size=vocab_size
    )
    if core is None and not capabilities.decoupled and "exclude_prompt" not in capabilities.inputs:
        raise EngineUnavailable(
            f"Triton model {model!r} has no exclude_input_in_output input and its core model "
            "cannot be read, so whether its answers begin with the prompt is unknown."
        )
    return capabilities


def _build_capabilities(
    model: str,
    config: Any,
    core: Any | None,
    text: TextModel | None,
    stop: StopModel | None,
    *,
    max_seq_len: int | None,
    vocab_size: int,
) -> ModelCapabilities:
    mode: Mode = "token" if text is None else "text"
    inputs = _drop_unrouted_inputs(config, read_inputs(config, _NAMES[mode]))
    _check(model, config, inputs, mode)
    known = core is not None
    core = core if core is not None else model_config_pb2.ModelConfig()
    engine_dir = Path(engine_folder(core))
    engine, problem = _engine_config(engine_dir)
    digest = hashlib.sha256(config.SerializeToString(deterministic=True))
    digest.update(json.dumps(engine.raw_config, sort_keys=True).encode())
    limit = max_seq_len if engine.max_seq_len is None else engine.max_seq_len
    if limit is None:
        raise EngineUnavailable(
            "The engine's length limit is unknown: its config.json is out of sight, so set "
            "GATEWAY_MAX_SEQ_LEN."
        )
    host_bytes = parameter(core, "lora_cache_host_memory_bytes")
    restates = "exclude_prompt" not in inputs and not core_flag(core, "exclude_input_in_output")
    beams = _beam_width(core, engine)
    dtype = None if text is not None and text.loses_lora else lora_dtype(inputs)
    return ModelCapabilities(
        model=model,
        inputs=inputs,
        outputs=frozenset(tensor.name for tensor in config.output),
        names_outputs=names_outputs(config),
        text=text,
        decoupled=bool(config.model_transaction_policy.decoupled),
        restates_prompt=restates,
        stop=stop,
        passes_cancellation=stop is None and _passes_cancellation(config),
        max_batch_size=engine.max_batch_size,
        max_seq_len=limit,
        max_input_len=engine.max_input_len,
        engine_dir=engine_dir,
        lora_dtype=dtype,
        lora_tp_size=None if dtype is None else engine.lora_tp_size,
        guides=_guides(inputs, core if known else None),
        max_beam_width=beams if "beam_width" in inputs else 1,
        context_logits="context_logits" in inputs and engine.gather_context_logits is True,
        logit_bytes=_logit_bytes(config),
        generation_logits="generation_logits" in inputs and engine.gather_generation_logits is True,
        tokens_per_block=engine.tokens_per_block or _DEFAULT_BLOCK,
        fingerprint=f"fp_{digest.hexdigest()[:12]}",
        vocab_size=engine.vocab_size or vocab_size,
        engine_problem=problem,
        lora_host_bytes=int(host_bytes) if host_bytes.isdecimal() else _DEFAULT_LORA_HOST_BYTES,
    )


def _drop_unrouted_inputs(config: Any, inputs: Inputs) -> Inputs:
    """Return `inputs` without the inputs that an ensemble declares but does not pass on.

    The ensemble of the GPT repository does not pass some inputs for words to its core model.
    """
    for step in config.ensemble_scheduling.step:
        if CORE["prompt"][0] in step.input_map:
            missing = [each for each in _WORD_INPUTS if not set(CORE[each]) & set(step.input_map)]
            return {logical: each for logical, each in inputs.items() if logical not in missing}
    return inputs


def _check(model: str, config: Any, inputs: Inputs, mode: Mode) -> None:
    """Raise EngineUnavailable if the model lacks an input, or belongs to the llmapi repository."""
    if any(tensor.name.startswith("sampling_param_") for tensor in config.input):
        raise EngineUnavailable(
            f"Triton model {model!r} is that of the llmapi repository (inputs sampling_param_*): "
            "it is driven as GATEWAY_TRITON_MODEL, with GATEWAY_TRITON_MODE unset or llmapi."
        )
    missing = [
        "/".join(_NAMES[mode][logical]) for logical in _NEEDED[mode] if logical not in inputs
    ]
    if missing:
        raise EngineUnavailable(f"Triton model {model!r} has no input {', '.join(missing)}.")


def is_speculative(core: Any) -> bool:
    """Return True if the engine uses speculative decoding: a step may then give several tokens."""
    return parameter(core, "decoding_mode") in _SPECULATIVE


def flag(config: Any, name: str, *, default: bool = False) -> bool:
    """Return a boolean parameter of a text model, read by the same rules as in NVIDIA's models.

    Return `default` if the value is neither one of `_TRUE` nor one of `_FALSE`.
    """
    value = parameter(config, name).lower()
    words = dict.fromkeys(_TRUE, True) | dict.fromkeys(_FALSE, False)
    return words.get(value, default)


def core_flag(config: Any, name: str) -> bool:
    """Return a boolean parameter of a core model. All values not in `_CORE_TRUE` mean False."""
    return parameter(config, name).lower() in _CORE_TRUE


def parameter(config: Any, name: str) -> str:
    """Return a string parameter of the model; "" if it is not set.

    An unfilled placeholder `${...}` counts as not set, as it does in NVIDIA's backends.
    """
    value = config.parameters[name].string_value if name in config.parameters else ""
    return "" if value.startswith("${") else str(value)


def _logit_bytes(config: Any) -> int:
    halves = (model_config_pb2.TYPE_FP16, model_config_pb2.TYPE_BF16)
    types = {tensor.name: tensor.data_type for tensor in config.output}
    return 2 if types.get("context_logits") in halves else 4


def _beam_width(config: Any, engine: EngineConfig) -> int:
    """Return the maximum beam width, which is the smaller of two limits.

    The model's limit is its parameter `max_beam_width`, or 1 if this is not set. The engine's limit
    is ignored if it is unknown.
    """
    allowed = parameter(config, "max_beam_width")
    model = int(allowed) if allowed.isdecimal() else 1
    return min(model, engine.max_beam_width or model)


def _guides(inputs: Inputs, core: Any | None) -> Backend | None:
    """Return the backend of guided decoding. Return None if guided decoding is not configured.

    If the core model's ModelConfig is not readable (`core` is None), return "xgrammar", which is
    the usual backend. If this is wrong, the engine reports an error for each guided request.
    """
    if "guide" not in inputs or "guide_type" not in inputs:
        return None
    backend = "xgrammar" if core is None else parameter(core, "guided_decoding_backend")
    if not backend:
        return None
    return "llguidance" if backend == "llguidance" else "xgrammar"


def loses_lora(config: Any) -> bool:
    """Return True if a model passes `lora_task_id` to the engine in a wrong shape.

    NVIDIA's BLS models before v0.19 do so: they declare `lora_task_id` with a reshape, and do not
    undo this reshape before they call the engine. BLS models since v0.19, and this project's BLS
    model for v0.17, undo the reshape. These models are recognised by their inputs for guided
    decoding.
    """
    if config.platform == "ensemble":
        return False
    if any(tensor.name == "guided_decoding_guide" for tensor in config.input):
        return False
    return any(t.name == "lora_task_id" and t.HasField("reshape") for t in config.input)


def _passes_cancellation(config: Any) -> bool:
    """Return True if a model stops the generation when the gateway's call to it is cancelled.

    Such a model declares the interval at which it checks for a cancellation. NVIDIA's BLS models do
    not check for a cancellation, and stop requests do not work with them either: the requests that
    they send to the engine have no id (up to v0.17) or a random id (since v0.19).

    The result is False for an ensemble, because Triton 2.51 does not pass the cancellation of an
    ensemble's call on to the ensemble's steps.
    """
    return config.platform != "ensemble" and bool(parameter(config, _CANCELLATION_PERIOD))


def _engine_config(engine_dir: Path) -> tuple[EngineConfig, str]:
    """Return the content of the engine's config.json, and an error text if it cannot be read.

    If the file does not exist on this host, the content is empty and the error text is "".
    """
    if engine_dir == Path():
        return EngineConfig(), ""
    try:
        return read_engine_config(engine_dir), ""
    except ConfigMissing:
        return EngineConfig(), ""
    except ConfigError as error:
        problem = f"the engine's limits are not known from its file: {error}"
        log.warning("%s", problem)
        return EngineConfig(), problem

"""Selection of the model in Triton that generates the answers.

The selected model is either the core model or a text model. The core model takes and returns token
ids. A text model, an ensemble or a BLS model, takes and returns text, and calls the core model.

See decision 062 in docs/decisions.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from gateway.errors import EngineUnavailable, EngineUnreachable, GatewayError
from gateway.triton.llmapi.model import is_llmapi, read_llmapi_capabilities
from gateway.triton.model_capabilities import (
    ModelCapabilities,
    TextModel,
    flag,
    is_speculative,
    loses_lora,
    parameter,
    read_capabilities,
    read_text_capabilities,
    stop_model,
)
from gateway.triton.names import TEXT, read_inputs

ModeSetting = Literal["auto", "token", "text", "llmapi"]

_TEXT_MODELS = ("ensemble", "tensorrt_llm_bls")
_BLS_PARTS = {"preprocessing": "preprocessing", "postprocessing": "postprocessing"}
# Input by which each step of an ensemble is recognised, because a step's model may have any name.
_STEPS = {"preprocessing": "QUERY", "core": "input_ids", "postprocessing": "TOKENS_BATCH"}


class ModelServer(Protocol):
    """Calls to a Triton server that the selection needs."""

    async def model_ready(self, model: str) -> bool: ...

    async def model_config(self, model: str) -> Any: ...


@dataclass(frozen=True, slots=True)
class ModelPreferences:
    """Settings of the operator that determine which model is selected, and its limits.

    Attributes:
        core: name of the core model.
        max_seq_len: maximum length in tokens, if the engine's config.json is not readable.
        vocab_size: number of tokens, if the engine's config.json is not readable.
        mode: value of GATEWAY_TRITON_MODE.
        text_model: name of the text model. None to use the ensemble, or the BLS model if the
            ensemble cannot be used.
        tokens_per_block: block size in tokens of the KV cache, for an llmapi model, which does not
            report it.
    """

    core: str
    max_seq_len: int | None
    vocab_size: int
    mode: ModeSetting = "auto"
    text_model: str | None = None
    tokens_per_block: int = 32


@dataclass(frozen=True, slots=True)
class ModelSelection:
    """The selected model, and why it was selected.

    `is_provisional` is True if a text model was selected only because Triton did not serve the core
    model yet.
    """

    capabilities: ModelCapabilities
    why: str
    is_provisional: bool = False
    tokenizer_warning: str | None = field(default=None, compare=False)
    """Warning about the tokenizer, for operators."""

    @property
    def warning(self) -> str | None:
        """Warning for operators about the selected model; None if there is no problem."""
        return "; ".join(filter(None, (self._model_warning, self.tokenizer_warning))) or None

    @property
    def _model_warning(self) -> str | None:
        if not self.capabilities.stoppable:
            return (
                f"{self.capabilities.model} cannot be stopped: a request whose client has left "
                "runs on to its end (docs/text-models.md)"
            )
        llmapi = self.capabilities.llmapi
        if llmapi is not None and llmapi.polls_ended and self.capabilities.streams_llmapi:
            return (
                f"{self.capabilities.model} may be TensorRT-LLM's own model.py, whose streamed "
                "answers can end Triton by signal 11. Triton 2.51 does that, and no release is "
                "known to be sound with that file; this project's model.py is sound on all "
                "(docs/llmapi-reference.md)"
            )
        return None


async def select_model(server: ModelServer, preferences: ModelPreferences) -> ModelSelection:
    """Select a model by the server's model configurations, and return the selection.

    Raises:
        EngineUnreachable: there is no connection.
        TimeoutError: the server does not answer.
        EngineUnavailable: no model can be used. The message has the reason for each model.
    """
    if preferences.mode == "token":
        return ModelSelection(await _read_core(server, preferences), "GATEWAY_TRITON_MODE is token")
    if preferences.mode == "text":
        return ModelSelection(await _read_text(server, preferences), "GATEWAY_TRITON_MODE is text")
    if preferences.mode == "llmapi":
        return ModelSelection(
            await _read_core(server, preferences), "GATEWAY_TRITON_MODE is llmapi"
        )
    served = await server.model_ready(preferences.core)
    try:
        core = await _read_core(server, preferences)
        takes = "token ids" if core.llmapi is None else "text, as llmapi's do"
        return ModelSelection(core, f"the core model takes {takes}")
    except EngineUnreachable:
        raise
    except EngineUnavailable as error:
        why = error.message
    try:
        return ModelSelection(await _read_text(server, preferences), why, is_provisional=not served)
    except EngineUnavailable as error:
        raise EngineUnavailable(f"{why} {error.message}") from error


async def _read_core(server: ModelServer, preferences: ModelPreferences) -> ModelCapabilities:
    if not await server.model_ready(preferences.core):
        raise EngineUnavailable(f"Triton does not serve {preferences.core!r}.")
    config = await server.model_config(preferences.core)
    if preferences.mode != "token" and is_llmapi(config):
        return read_llmapi_capabilities(
            preferences.core,
            config,
            max_seq_len=preferences.max_seq_len,
            vocab_size=preferences.vocab_size,
            tokens_per_block=preferences.tokens_per_block,
        )
    if preferences.mode == "llmapi":
        raise EngineUnavailable(
            f"Triton model {preferences.core!r} is not of the llmapi repository."
        )
    return read_capabilities(
        preferences.core,
        config,
        max_seq_len=preferences.max_seq_len,
        vocab_size=preferences.vocab_size,
    )


async def _read_text(server: ModelServer, preferences: ModelPreferences) -> ModelCapabilities:
    reasons = []
    for model in (preferences.text_model,) if preferences.text_model else _TEXT_MODELS:
        try:
            return await _read_text_model(server, model, preferences)
        except EngineUnreachable:
            raise
        except EngineUnavailable as error:
            reasons.append(error.message)
    raise EngineUnavailable(" ".join(reasons))


async def _read_text_model(
    server: ModelServer, model: str, preferences: ModelPreferences
) -> ModelCapabilities:
    if not await server.model_ready(model):
        raise EngineUnavailable(f"Triton does not serve {model!r}.")
    config = await server.model_config(model)
    is_ensemble = config.platform == "ensemble"
    names = _steps(config) if is_ensemble else _BLS_PARTS | {"core": _bls_core(config)}
    parts = {part: await _read_if_served(server, name) for part, name in names.items()}
    core = parts.get("core")
    # Check that the core model is served. Triton checks this for an ensemble, but not for a BLS
    # model.
    if preferences.mode == "auto" and core is None:
        raise EngineUnavailable(f"Triton serves {model!r} but not its core model.")
    stop = None
    if is_ensemble and core is not None:
        # Send stop requests to the core model. This works only for an ensemble, whose steps get the
        # request id of the ensemble. A BLS model sends requests with other ids to the core model.
        stop = stop_model(names["core"], core)
    return read_text_capabilities(
        model,
        config,
        core,
        _text_facts(config, parts),
        stop=stop,
        max_seq_len=preferences.max_seq_len,
        vocab_size=preferences.vocab_size,
    )


def _text_facts(config: Any, parts: dict[str, Any]) -> TextModel:
    core, before, after = (parts.get(p) for p in ("core", "preprocessing", "postprocessing"))
    accumulates = flag(config, "accumulate_tokens")
    # Use non-streaming answers only if it is known whether the model repeats the prompt in them.
    is_single_usable = core is not None or "exclude_prompt" in read_inputs(config, TEXT)
    return TextModel(
        adds_special_tokens=_adds_special_tokens(before, core),
        skips_special_tokens=after is None or flag(after, "skip_special_tokens", default=True),
        accumulates=accumulates,
        prefers_single_response=is_single_usable and not accumulates,
        token_by_token=core is None or not is_speculative(core),
        loses_lora=loses_lora(config),
    )


def _adds_special_tokens(preprocessing: Any | None, core: Any | None) -> bool:
    """Return True if preprocessing adds special tokens to a prompt.

    If this is not configured, return the default of the model's release: True since v0.10, and
    False before. v0.10 and later are recognised by inputs that older releases do not have.
    """
    if preprocessing is None:
        return True
    newer = {"DECODER_QUERY"} & {tensor.name for tensor in preprocessing.input}
    if core is not None:
        newer |= {"early_stopping"} & {tensor.name for tensor in core.input}
    return flag(preprocessing, "add_special_tokens", default=bool(newer))


def _steps(config: Any) -> dict[str, str]:
    """Return the model name of each step of an ensemble. The keys are those of `_STEPS`."""
    found = {}
    for step in config.ensemble_scheduling.step:
        for part, name in _STEPS.items():
            if name in step.input_map:
                found[part] = step.model_name
    return found


def _bls_core(config: Any) -> str:
    return parameter(config, "tensorrt_llm_model_name") or "tensorrt_llm"


async def _read_if_served(server: ModelServer, model: str) -> Any | None:
    """Return the model's ModelConfig. Return None if it is not served or cannot be read."""
    try:
        return await server.model_config(model) if await server.model_ready(model) else None
    except GatewayError:
        return None

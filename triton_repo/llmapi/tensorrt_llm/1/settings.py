"""Reader of model.yaml, which has the arguments of `LLM` and the model's settings for Triton."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton_python_backend_utils as pb_utils
import yaml

DEFAULT_PERIOD_MS = 100


@dataclass(frozen=True)
class Behaviour:
    """Differences between releases of the llmapi model that clients must handle."""

    streams: bool = True
    """False if the complete text comes in one response, even for requests with `streaming`."""
    answers_early_errors: bool = True
    """False if a request gets no response at all when it fails before it reaches the engine."""
    ends_stopped: bool = True
    """False if a request gets no final response when a stop request ends it."""
    empty_final: bool = False
    """True if a stream ends with an extra response that has only the final flag, without text."""


# Behaviour of upstream's llmapi model in three versions: `main` is upstream's main branch since
# September 2026. `1.3` is the development branch from May to September 2026. `1.2` is release 1.2.
BEHAVIOURS = {
    "main": Behaviour(),
    "1.3": Behaviour(answers_early_errors=False, empty_final=True),
    "1.2": Behaviour(streams=False, ends_stopped=False),
}


@dataclass(frozen=True)
class ModelSettings:
    llm: dict[str, Any]
    """The keyword arguments of `LLM`, not checked here."""
    decoupled: bool
    max_batch_size: int
    cancellation_check_period: float
    """Polling interval for disconnected clients, in seconds."""
    behaviour: Behaviour
    polls_ended: bool
    """True to poll requests for cancellation as upstream's model does, also after their end."""


def read_settings() -> ModelSettings:
    """Read model.yaml in the model's version folder, or the file that LLM_CONFIG_PATH names.

    Raises TritonModelException if the file or a setting is missing or not allowed.
    """
    path = Path(pb_utils.get_model_dir()) / os.environ.get("LLM_CONFIG_PATH", "model.yaml")
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise pb_utils.TritonModelException(f"{path}: {error}") from error
    own = values.pop("triton_config", None) if isinstance(values, dict) else None
    if not isinstance(own, dict):
        raise pb_utils.TritonModelException(f"{path}: triton_config: found nothing")
    for name in ("decoupled", "max_batch_size"):
        if name not in own:
            raise pb_utils.TritonModelException(f"{path}: triton_config.{name}: found nothing")
    behaves_as = str(own.get("behaves_as", "main"))
    allowed = {
        "max_batch_size": (0,),
        "multimodal": (False,),
        "behaves_as": tuple(BEHAVIOURS),
        "polls_ended_requests": (False, True),
    }
    defaults = {"multimodal": False, "polls_ended_requests": False}
    found = {**defaults, **own, "behaves_as": behaves_as}
    for name, values_allowed in allowed.items():
        if found[name] not in values_allowed:
            raise pb_utils.TritonModelException(
                f"{path}: triton_config.{name}: found {found[name]}; allowed: "
                f"{', '.join(map(str, values_allowed))}"
            )
    period = int(own.get("cancellation_check_period_ms", DEFAULT_PERIOD_MS))
    return ModelSettings(
        llm=values,
        decoupled=bool(own["decoupled"]),
        max_batch_size=int(own["max_batch_size"]),
        cancellation_check_period=period / 1000,
        behaviour=BEHAVIOURS[behaves_as],
        polls_ended=found["polls_ended_requests"],
    )

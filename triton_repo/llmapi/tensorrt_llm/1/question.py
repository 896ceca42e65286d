"""Translation of a Triton request to the arguments of the LLM API."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llm_api import LoRARequest, SamplingParams

# Fields of SamplingParams that are set by an input `sampling_param_NAME` with one element. Other
# fields have their defaults.
_SAMPLING = (
    *("best_of", "temperature", "top_k", "top_p", "frequency_penalty", "presence_penalty"),
    *("max_tokens", "seed", "exclude_input_from_output", "return_perf_metrics"),
)
OPTIONAL_OUTPUTS = ("finish_reason", "stop_reason", "cumulative_logprob")


@dataclass(frozen=True)
class GenerationRequest:
    prompt: str
    sampling: Any
    """A `SamplingParams` object."""
    lora: Any
    """A `LoRARequest`, or None."""
    streaming: bool
    outputs: tuple[str, ...]
    """The outputs in `OPTIONAL_OUTPUTS` that the client requested."""


class RequestInputs:
    """The input tensors of a request by name. Triton has already checked their shapes."""

    def __init__(self, request: Any) -> None:
        self._tensors = {tensor.name(): tensor for tensor in request.inputs()}

    def scalar(self, name: str, default: Any = None) -> Any:
        if name not in self._tensors:
            return default
        value = self._tensors[name].as_numpy().item()
        return value.decode() if isinstance(value, bytes) else value

    def texts(self, name: str) -> list[str] | None:
        """Return the texts of an input; None if it is missing. Raises ValueError for non-UTF-8."""
        if name not in self._tensors:
            return None
        return [value.decode() for value in self._tensors[name].as_numpy()]


def read_question(inputs: RequestInputs) -> GenerationRequest:
    """Return the parsed request. Raises ValueError if an input is missing or wrong."""
    texts = inputs.texts("text_input")
    if not texts:
        raise ValueError("text_input is missing from the request")
    given = {name: inputs.scalar(f"sampling_param_{name}") for name in _SAMPLING}
    sampling = {"exclude_input_from_output": False, "best_of": 1}
    sampling |= {name: value for name, value in given.items() if value is not None}
    return GenerationRequest(
        prompt=texts[0],
        sampling=SamplingParams(**sampling, stop=inputs.texts("sampling_param_stop")),
        lora=_lora(inputs),
        streaming=inputs.scalar("streaming", default=False),
        outputs=tuple(
            name for name in OPTIONAL_OUTPUTS if inputs.scalar(f"return_{name}", default=False)
        ),
    )


def _lora(inputs: RequestInputs) -> Any:
    key, name, path = (inputs.scalar(f"lora_{field}") for field in ("id", "name", "path"))
    if key is name is path is None:
        return None
    if None in (key, name, path):
        raise ValueError("lora_id, lora_name, and lora_path must all be provided together")
    source = inputs.scalar("lora_ckpt_source", default="hf")
    if source not in ("hf", "nemo"):
        raise ValueError(f"lora_ckpt_source: found {source}; allowed: hf, nemo")
    if not Path(path).exists():
        raise ValueError(f"lora_path does not exist on the Triton server's filesystem: {path}")
    return LoRARequest(lora_name=name, lora_int_id=key, lora_path=path, lora_ckpt_source=source)

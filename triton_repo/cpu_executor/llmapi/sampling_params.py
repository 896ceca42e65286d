"""``SamplingParams`` of the LLM API: sampling, end conditions and outputs of a request."""

from __future__ import annotations

from dataclasses import dataclass

from triton_repo.cpu_executor.sampling_config import SamplingConfig


@dataclass(kw_only=True)
class SamplingParams:
    """Sampling parameters; ``None`` means unset.

    Generation ends at a stop string, at an id in ``stop_token_ids``, at ``end_id``, or at one of
    the EOS ids in the model's ``generation_config.json``. If ``end_id`` is None, the tokenizer's
    EOS id is used. If ``ignore_eos`` is set, ``end_id`` and all EOS ids are ignored. Each stop
    string is encoded to token ids, and these are compared with the generated ids.

    Raises ``ValueError`` for a field that is out of range or not supported by the CPU executor.
    Raises ``TypeError`` for a field of the LLM API that this class does not have.
    """

    end_id: int | None = None
    max_tokens: int = 32
    n: int = 1
    best_of: int | None = None
    beam_width: int = 1  # only in 0.19
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None
    min_tokens: int | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    exclude_input_from_output: bool = True
    return_perf_metrics: bool = False
    add_special_tokens: bool = True
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        _require("max_tokens", self.max_tokens, self.max_tokens > 0, "> 0")
        _require("temperature", self.temperature, (self.temperature or 0) >= 0, ">= 0")
        _require("top_k", self.top_k, (self.top_k or 0) >= 0, ">= 0")
        _require("top_p", self.top_p, 0 <= (self.top_p or 0) <= 1, "from 0 to 1")
        if self.beam_width > 1:
            raise ValueError("beam_width above 1 is not supported by the CPU executor")
        if max(self.n, self.best_of or 1) > 1:
            if self.is_greedy:
                raise ValueError(
                    "Greedy decoding in the LLM API does not allow multiple returns; "
                    f"found best_of={self.best_of}, n={self.n}"
                )
            raise ValueError("best_of and n above 1 are not supported by the CPU executor")

    @property
    def is_greedy(self) -> bool:
        """True if the most likely token is chosen in each step.

        This is the default if neither ``temperature`` nor ``top_k`` nor ``top_p`` is set.
        """
        return (
            self.temperature is self.top_k is self.top_p is None
            or self.top_k == 1
            or self.top_p == 0
            or self.temperature == 0
        )

    @property
    def stop_strings(self) -> list[str]:
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else list(self.stop)

    def sampling_config(self) -> SamplingConfig:
        """Return the parameters as the executor's ``SamplingConfig``."""
        greedy = self.is_greedy
        return SamplingConfig(
            temperature=None if greedy else self.temperature,
            top_k=1 if greedy else self.top_k,
            top_p=None if greedy else (1.0 if self.top_p is None else self.top_p),
            seed=self.seed,
            min_tokens=self.min_tokens,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
        )


def _require(name: str, value: float | None, is_right: bool, allowed: str) -> None:
    if not is_right:
        raise ValueError(f"{name}: found {value}; allowed: {allowed}")

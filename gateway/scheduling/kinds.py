"""Model variants: groups of replicas that have equal capabilities and can run the same requests.

The replicas form several variants while an operator migrates from one model repository to another.
Replicas with the old repository and replicas with the new repository then serve the same model
name. When the gateway finds a new combination of variants, it logs how they differ.

See decision 023 in docs/decisions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import get_args

from gateway.generation.options import PlainParameter
from gateway.triton.model_capabilities import ModelCapabilities
from gateway.triton.names import LogicalInput

Lane = frozenset[object] | None
"""Set of model variants that can run a request. None means all variants.

A tenant's requests with equal sets wait in the same queue.
"""


@dataclass(frozen=True, slots=True, eq=False)
class ModelVariant:
    """Group of replicas with equal `capabilities`. Variants are compared by identity.

    The fields `fingerprint` and `engine_dir` of `capabilities` are empty, because they may differ
    between the replicas of a variant.
    """

    capabilities: ModelCapabilities


class VariantRegistry:
    """Registry of all model variants that replicas have had since the process started.

    Variants are never removed. If all replicas of a variant are replaced while a request waits, the
    new replicas get the same variant object, so they can run the request.
    """

    def __init__(self) -> None:
        self._known: list[ModelVariant] = []

    def find_or_add(self, capabilities: ModelCapabilities) -> ModelVariant:
        """Return the variant with these capabilities. Add it to the registry if it is new."""
        common = replace(capabilities, fingerprint="", engine_dir=Path())
        for variant in self._known:
            if variant.capabilities == common:
                return variant
        self._known.append(variant := ModelVariant(common))
        return variant


def _has_input(name: LogicalInput, capabilities: ModelCapabilities) -> bool:
    return name in capabilities.inputs


# Features in which model variants may differ: the feature's name in log lines, and a function that
# returns a true value if the model has the feature.
_FEATURES: tuple[tuple[str, Callable[[ModelCapabilities], object]], ...] = (
    ("log probabilities", lambda c: c.text is None and "log_probs" in c.inputs),
    ("token ids in answers", lambda c: c.text is None),
    ("prompt_logprobs", lambda c: c.text is None and c.context_logits),
    ("guides", lambda c: c.guides),
    ("beam search", lambda c: c.max_beam_width > 1),
    ("logit_bias", lambda c: "bias" in c.inputs),
    ("bad_words", lambda c: "bad_words" in c.inputs),
    ("stop_token_ids", lambda c: c.text is None and "stop_words" in c.inputs),
    ("min_tokens", lambda c: "min_tokens" in c.inputs),
    ("ignore_eos", lambda c: "end_id" in c.inputs),
    *((name, partial(_has_input, name)) for name in get_args(PlainParameter)),
    ("skip_special_tokens false", lambda c: c.text is None or not c.text.skips_special_tokens),
    ("streams", lambda c: c.decoupled),
    ("adapters", lambda c: c.reads_adapters or c.lora_dtype),
)


def describe_differences(variants: Sequence[ModelVariant]) -> list[str]:
    """Return a log message for each variant: the features that at least one other variant lacks."""
    least = min(variant.capabilities.max_seq_len for variant in variants)
    lines = []
    for variant in variants:
        own = variant.capabilities
        others = [other.capabilities for other in variants if other is not variant]
        alone = [
            what for what, can in _FEATURES if can(own) and not all(can(other) for other in others)
        ]
        if own.max_seq_len > least:
            alone.append(f"more than {least} tokens of prompt and answer")
        ranks = own.lora_tp_size
        if ranks and all(other.lora_tp_size not in (None, ranks) for other in others):
            alone.append(f"adapters laid out for tp_size {ranks}")
        told = ", ".join(alone) or "nothing"
        lines.append(f"{own.mode} mode on {own.model!r} serves what not all do: {told}")
    return lines

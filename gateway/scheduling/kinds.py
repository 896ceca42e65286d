"""The kinds of replicas in a pool: those of one kind can be given the same requests.

While an operator moves from one model repository to another, replicas of both stand under one model
name. What only some of them can do is told once, when that begins.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import get_args

from gateway.generation import PlainParameter
from gateway.triton.model_capabilities import ModelCapabilities
from gateway.triton.names import LogicalInput

Lane = frozenset[object] | None
"""The kinds that can take a request: it waits with those that need the same ones. None is all."""


@dataclass(frozen=True, slots=True, eq=False)
class Kind:
    """Known by identity. `capabilities` is what all its replicas have in common: without the
    fingerprint and the engine's folder, which each has for itself."""

    capabilities: ModelCapabilities


class Kinds:
    """All that were seen. A request may outlive the replicas that it was prepared for, and meet
    others of their kind; so none is forgotten."""

    def __init__(self) -> None:
        self._known: list[Kind] = []

    def of(self, capabilities: ModelCapabilities) -> Kind:
        common = replace(capabilities, fingerprint="", engine_dir=Path())
        for kind in self._known:
            if kind.capabilities == common:
                return kind
        self._known.append(kind := Kind(common))
        return kind


def _takes(name: LogicalInput, capabilities: ModelCapabilities) -> bool:
    return name in capabilities.inputs


# In words, and who can do it.
_CAN: tuple[tuple[str, Callable[[ModelCapabilities], object]], ...] = (
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
    *((name, partial(_takes, name)) for name in get_args(PlainParameter)),
    ("skip_special_tokens false", lambda c: c.text is None or not c.text.skips_special_tokens),
    ("streams", lambda c: c.decoupled),
    ("adapters", lambda c: c.reads_adapters or c.lora_dtype),
)


def differences(kinds: Sequence[Kind]) -> list[str]:
    """What not all of several kinds can do, a line for each kind."""
    least = min(kind.capabilities.max_seq_len for kind in kinds)
    lines = []
    for kind in kinds:
        own = kind.capabilities
        others = [other.capabilities for other in kinds if other is not kind]
        alone = [what for what, can in _CAN if can(own) and not all(can(other) for other in others)]
        if own.max_seq_len > least:
            alone.append(f"more than {least} tokens of prompt and answer")
        ranks = own.lora_tp_size
        if ranks and all(other.lora_tp_size not in (None, ranks) for other in others):
            alone.append(f"adapters laid out for tp_size {ranks}")
        told = ", ".join(alone) or "nothing"
        lines.append(f"{own.mode} mode on {own.model!r} serves what not all do: {told}")
    return lines

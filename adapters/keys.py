"""Parser of the tensor names in an adapter's weights file.

For each tensor name, the parser returns the LoRA module, and whether the tensor is A or B.

PEFT names a tensor ``base_model.model.PATH.lora_A.weight``. Other programs omit the prefix
``base_model.model``, append the adapter's name to `lora_A`, or leave the names of training wrappers
such as `_orig_mod` in the path. TensorRT-LLM's converter accepts all these names, because it
searches only for ``.layers.N.``. This module accepts the same names, with one exception: it refuses
an unknown prefix before ``.layers.N.``, because the layers may belong to a vision or audio encoder
instead of the text model.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise

from adapters.base_model import BaseModel
from adapters.errors import (
    AdapterError,
    CorruptFile,
    LayerOutOfRange,
    TooLarge,
    UnsupportedFeature,
    UnsupportedModule,
)
from adapters.modules import Family, ModuleLocation, family
from adapters.peft import WEIGHTS

MAX_KEY_CHARACTERS = 1024
_SIDES = ("lora_A", "lora_B")
_PEFT_PREFIX = ["base_model", "model"]
# Path parts that torch.compile, DistributedDataParallel, FSDP and activation checkpointing insert.
_WRAPPERS = frozenset(["_orig_mod", "module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"])
# Path parts that are allowed before the layer list, besides the path parts in `Family.layers`:
# PEFT's prefix, and the name of the text model in a multimodal model.
_ROOTS = frozenset(["base_model", "model", "language_model"])
_OTHER_TOWERS = frozenset(
    [
        *("visual", "vision", "vision_tower", "vision_model", "vision_encoder", "image_encoder"),
        *("multi_modal_projector", "mm_projector", "connector", "aligner"),
        *("audio", "audio_tower", "audio_model", "audio_encoder", "speech_encoder"),
    ]
)
_EMBEDDING = re.compile(r"\b(embed_tokens|lm_head|wte|wpe)\b")
_ALLOWED = "base_model.model.<module>.lora_A.weight and lora_B.weight"


@dataclass(frozen=True, slots=True)
class LoraKey:
    """A parsed tensor name.

    Attributes:
        path: path of the module in the Hugging Face model, without PEFT's prefix and wrappers.
        location: position of the module in the model.
        side: "A" or "B".
        adapter: the adapter's name, if the tensor name contains it behind `lora_A` or `lora_B`,
            else "".
        spellings: all paths by which `rank_pattern` and `alpha_pattern` may name the module. A
            tensor name in PEFT's own format has one such path. For other tensor names, there are
            paths with and without the prefix and the wrappers.
    """

    path: str
    location: ModuleLocation
    side: str
    adapter: str
    spellings: tuple[str, ...]


@dataclass(slots=True)
class LoraModule:
    """A LoRA module of an adapter.

    `keys` maps "A" and "B" to the names of the module's two tensors. `spellings` combines the
    `LoraKey.spellings` of these two names.
    """

    location: ModuleLocation
    keys: dict[str, str] = field(default_factory=dict)
    spellings: set[str] = field(default_factory=set)


def read_modules(keys: Iterable[str], base: BaseModel) -> dict[str, LoraModule]:
    """Return the modules that these tensors belong to, by `LoraKey.path`.

    The function raises at the first name that is invalid for the model.

    Raises:
        LayerOutOfRange: the model does not have the layer or the expert.
        UnsupportedEngine: the model's architecture is unknown.
        UnsupportedFeature: a tensor is not a LoRA tensor, or the tensors belong to several
            adapters.
        UnsupportedModule: the module is not in the model's layers.
        CorruptFile: two names mean the same tensor, for example with and without PEFT's prefix.
        TooLarge: a name is too long.
    """
    layout = family(base)
    modules: dict[str, LoraModule] = {}
    first: tuple[str, str] | None = None
    for key in keys:
        found = read_key(key, layout)
        module = modules.get(found.path)
        if module is None:
            _check_range(found, base)
            module = modules[found.path] = LoraModule(found.location)
        if (other := module.keys.setdefault(found.side, key)) != key:
            why = f"both are {found.path}.lora_{found.side}.weight"
            raise CorruptFile(WEIGHTS, other, key, "one name for each tensor", why)
        module.spellings.update(found.spellings)
        first = first or (found.adapter, key)
        if found.adapter != first[0]:
            why = "these are of two adapters; save one of them, with selected_adapters"
            raise UnsupportedFeature(WEIGHTS, first[1], key, "the tensors of one adapter", why)
    return modules


def _check_range(key: LoraKey, base: BaseModel) -> None:
    layer, expert = key.location.layer, key.location.expert
    if layer >= base.num_hidden_layers:
        allowed = f"0 .. {base.num_hidden_layers - 1}"
        raise LayerOutOfRange(WEIGHTS, f"layer of {key.path}", layer, allowed)
    if expert is not None and expert >= base.num_experts:
        allowed = f"0 .. {base.num_experts - 1}"
        raise LayerOutOfRange(WEIGHTS, f"expert of {key.path}", expert, allowed)


def read_key(key: str, layout: Family) -> LoraKey:
    """Parse the name of one tensor. Raise the same errors as `read_modules`."""
    if len(key) > MAX_KEY_CHARACTERS:
        found = f"{key[:80]}... of {len(key)} characters"
        raise TooLarge(WEIGHTS, "tensor", found, f"a name of up to {MAX_KEY_CHARACTERS}")
    parts = key.split(".")
    bare = [part for part in parts if part not in _WRAPPERS]
    place = next((at for at in (-2, -3) if len(bare) > -at and bare[at] in _SIDES), None)
    if place is None or bare[-1] != "weight":
        raise _not_lora(key)
    side, adapter = bare[place], bare[-2] if place == -3 else ""
    module = bare[:place]
    start = _layers_start(module, layout, key)
    path = f"{layout.layers}.{'.'.join(module[start + 1 :])}"
    place_in_layer = layout.locate(path)
    if place_in_layer is None:
        raise _unknown(path, layout)
    spellings = _spellings(parts[: len(parts) - parts[::-1].index(side) - 1], module, path)
    return LoraKey(path, place_in_layer, side[-1], adapter, spellings)


def _layers_start(module: list[str], layout: Family, key: str) -> int:
    """Return the index of the part of a module's path that names the list of layers (`layers`)."""
    *root, layers = layout.layers.split(".")
    start = next(
        (
            index
            for index, (part, number) in enumerate(pairwise(module))
            if part == layers and number.isdecimal()
        ),
        len(module),
    )
    unknown = [part for part in module[:start] if part not in _ROOTS and part not in root]
    if other := _OTHER_TOWERS.intersection(unknown):
        why = (
            f"{min(other)} is not the text model, which alone the engine adapts: "
            "train without it (exclude_modules), or take its tensors out"
        )
        raise UnsupportedModule(WEIGHTS, "tensor", key, f"modules of {layout.layers}", why)
    if _EMBEDDING.search(".".join(module)):
        raise _not_lora(key)
    if start == len(module) or unknown:
        raise _unknown(".".join(module), layout)
    return start


def _unknown(module: str, layout: Family) -> UnsupportedModule:
    allowed = ", ".join(f"{layout.layers}.N.{name}" for name in layout.projections)
    return UnsupportedModule(WEIGHTS, "module", module, allowed)


def _spellings(raw: list[str], bare: list[str], path: str) -> tuple[str, ...]:
    """Return all paths that keys of `rank_pattern` may use for the module of a tensor.

    A tensor name in PEFT's format contains the path that PEFT compares with the keys, so only this
    path is returned. For any other tensor name, it is unknown whether the keys contain the prefix
    and the wrappers. The paths with and without them are returned.

    `raw` has the parts of the module's path in the tensor name. `bare` has the same parts without
    the names of training wrappers. `path` is the path in the Hugging Face model.
    """
    start = next((at for at, part in enumerate(raw) if part not in _WRAPPERS), 0)
    given = raw[start + 2 :]
    if raw[start : start + 2] != _PEFT_PREFIX:
        given = raw
    elif _WRAPPERS.isdisjoint(given):
        return (".".join(given),)
    stripped = bare[2:] if bare[:2] == _PEFT_PREFIX else bare
    return tuple(dict.fromkeys((".".join(given), ".".join(stripped), path)))


def _not_lora(key: str) -> AdapterError:
    if "lora_magnitude_vector" in key:
        return UnsupportedFeature(WEIGHTS, "tensor", key, _ALLOWED, "DoRA")
    if "lora_embedding" in key or _EMBEDDING.search(key):
        why = "there is no LoRA module id for embeddings and lm_head"
        return UnsupportedModule(WEIGHTS, "tensor", key, _ALLOWED, why)
    return UnsupportedFeature(WEIGHTS, "tensor", key, _ALLOWED, "nothing is left out silently")

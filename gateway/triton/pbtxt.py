"""Reader of config.pbtxt files, with Triton's own protobuf."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from google.protobuf import text_format

from gateway.triton.protobuf import model_config_pb2

_STRING = re.compile(r""""(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'|#[^\n]*""")
_HOLE = re.compile(r"(?:(\w+)\s*:\s*)?\$\{(\w+)\}")


class PbtxtError(ValueError):
    """Error for an invalid model configuration; the message has line and column if known."""


@dataclass(frozen=True, slots=True)
class DeclaredTensor:
    """An input or output. `data_type` is a name such as TYPE_FP16; `dims` leaves out the batch."""

    data_type: str
    dims: tuple[int, ...]
    optional: bool


@dataclass(frozen=True, slots=True)
class EnsembleStep:
    """A step of an ensemble: its model, and how the model's tensors are connected.

    Both maps have the name of the ensemble's tensor for each name of the model's tensor.
    """

    model: str
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class ModelFile:
    """The declarations of a config.pbtxt.

    `backend` is the platform for an ensemble. `parameters` has the strings as in the file, with
    placeholders `${name}` unfilled. `instance_count` is the sum over the instance groups, 0 without
    any; `instance_kinds` are the groups' kinds, such as KIND_CPU.

    `holes` are the names of placeholders `${name}` outside strings, which Triton cannot parse. A
    field with such a placeholder is read as 0, and `decoupled` as true.
    """

    name: str
    backend: str
    max_batch_size: int
    decoupled: bool
    inputs: Mapping[str, DeclaredTensor]
    outputs: Mapping[str, DeclaredTensor]
    parameters: Mapping[str, str]
    instance_count: int
    instance_kinds: frozenset[str]
    max_queue_size: int
    steps: tuple[EnsembleStep, ...]
    holes: tuple[str, ...]


def read_pbtxt(path: Path) -> ModelFile:
    """Return the declarations of a config.pbtxt.

    Raises PbtxtError if the file cannot be read or is not a model configuration.
    """
    try:
        text, holes = _fill_holes(path.read_text(encoding="utf-8"))
        # Ignore unknown fields: a newer Triton may have more fields than this protobuf.
        config = text_format.Parse(text, model_config_pb2.ModelConfig(), allow_unknown_field=True)
    except OSError as error:
        raise PbtxtError(str(error.strerror)) from error
    except (UnicodeDecodeError, text_format.ParseError) as error:
        raise PbtxtError(str(error)) from error
    return ModelFile(
        name=config.name,
        backend=config.backend or config.platform,
        max_batch_size=config.max_batch_size,
        decoupled=config.model_transaction_policy.decoupled,
        inputs=_tensors(config.input),
        outputs=_tensors(config.output),
        parameters={name: value.string_value for name, value in config.parameters.items()},
        instance_count=sum(group.count for group in config.instance_group),
        instance_kinds=frozenset(
            model_config_pb2.ModelInstanceGroup.Kind.Name(group.kind)
            for group in config.instance_group
        ),
        max_queue_size=config.dynamic_batching.default_queue_policy.max_queue_size,
        steps=tuple(
            EnsembleStep(step.model_name, dict(step.input_map), dict(step.output_map))
            for step in config.ensemble_scheduling.step
        ),
        holes=holes,
    )


def _tensors(declared: Iterable[Any]) -> dict[str, DeclaredTensor]:
    # Only inputs have the field `optional`.
    return {
        tensor.name: DeclaredTensor(
            model_config_pb2.DataType.Name(tensor.data_type),
            tuple(tensor.dims),
            getattr(tensor, "optional", False),
        )
        for tensor in declared
    }


def _fill_holes(text: str) -> tuple[str, tuple[str, ...]]:
    """Replace each placeholder `${name}` outside strings by 0 or true.

    Return the text and the names of the placeholders.
    """
    holes: dict[str, None] = {}

    def value(found: re.Match[str]) -> str:
        field, name = found.groups()
        holes[name] = None
        neutral = "true" if field == "decoupled" else "0"
        return f"{field}: {neutral}" if field else neutral

    parts, end = [], 0
    for string in _STRING.finditer(text):
        parts += [_HOLE.sub(value, text[end : string.start()]), string.group()]
        end = string.end()
    parts.append(_HOLE.sub(value, text[end:]))
    return "".join(parts), tuple(holes)

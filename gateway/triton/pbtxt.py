"""Reader of config.pbtxt files (model configurations), based on Triton's protobuf messages."""

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
    """Error for an invalid model configuration. The message has line and column if known."""


@dataclass(frozen=True, slots=True)
class DeclaredTensor:
    """An input or output of a model.

    `data_type` is a name such as TYPE_FP16. `dims` has no batch dimension.
    """

    data_type: str
    dims: tuple[int, ...]
    optional: bool


@dataclass(frozen=True, slots=True)
class EnsembleStep:
    """A step of an ensemble.

    `inputs` and `outputs` map the names of the model's tensors to names of the ensemble's tensors.
    """

    model: str
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class ModelFile:
    """Content of a config.pbtxt file.

    Attributes:
        backend: the backend, or "ensemble" for an ensemble.
        parameters: the string parameters as in the file; placeholders `${name}` are not replaced.
        instance_count: total number of instances in all instance groups; 0 if the file has no
            instance group.
        instance_kinds: the kinds of the instance groups, such as KIND_CPU.
        holes: names of placeholders `${name}` outside strings. Triton cannot parse a file with such
            placeholders. `read_pbtxt` reads each of these placeholders as 0, or as True in the
            field `decoupled`.
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
    """Return the content of a config.pbtxt.

    Raise PbtxtError if the file cannot be read or is not a model configuration.
    """
    try:
        text, holes = _fill_holes(path.read_text(encoding="utf-8"))
        # Ignore unknown fields, because a newer Triton may have more fields.
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
    # Use a default for `optional`, because outputs do not have this field.
    return {
        tensor.name: DeclaredTensor(
            model_config_pb2.DataType.Name(tensor.data_type),
            tuple(tensor.dims),
            getattr(tensor, "optional", False),
        )
        for tensor in declared
    }


def _fill_holes(text: str) -> tuple[str, tuple[str, ...]]:
    """Replace each placeholder `${name}` outside strings by 0, or by true for `decoupled`.

    Return the new text and the names of the placeholders.
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

"""Checks of a model's folder: missing files, truncated files, and files of another format."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from adapters.file_kinds import GGUF, PICKLE, FileKind, find_gguf, kind_of_file

INDEX = "model.safetensors.index.json"
_WEIGHTS = "model*.safetensors"
_PICKLES = "pytorch_model*.bin"
_TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json"),
    *("chat_template.jinja", "generation_config.json"),
)
_MAX_INDEX_BYTES = 64 * 1024 * 1024
_MAX_HEADER_BYTES = 100_000_000  # safetensors' own limit
_METADATA = "__metadata__"
_SHOWN = 3


@dataclass(frozen=True, slots=True)
class FileProblem:
    """A file that cannot be used.

    `found` has the file's name and the problem. `fix` is advice to the operator.
    """

    found: str
    fix: str

    def __str__(self) -> str:
        return f"{self.found}; {self.fix}"


def tokenizer_problems(folder: Path) -> list[FileProblem]:
    """Return a problem for each tokenizer file whose content does not have the expected format.

    The content may be a Git LFS pointer or a web page, for example (see `adapters.file_kinds`).
    """
    return _foreign_problems(folder, _TOKENIZER_FILES)


def find_weights(folder: Path) -> list[Path]:
    """Return the safetensors files in a model's folder, sorted by name."""
    return sorted(folder.glob(_WEIGHTS))


def weight_problems(folder: Path) -> list[FileProblem]:
    """Return all problems that prevent a program from loading the weights in a folder."""
    found = [path.name for path in find_weights(folder)]
    if (folder / INDEX).exists():
        if problems := _foreign_problems(folder, (INDEX, *found)):
            return problems
        try:
            shards = _read_shard_names(folder / INDEX)
        except ValueError as error:
            return [FileProblem(f"{folder / INDEX} {error}", "download it again")]
        if missing := [name for name in shards if not (folder / name).is_file()]:
            return [_missing_problem(folder, missing, len(shards))]
    elif problems := _foreign_problems(folder, found):
        return problems
    elif not found:
        return [_no_weights_problem(folder)]
    cut = ((folder / name, _expected_size_if_truncated(folder / name)) for name in found)
    return [_truncated_problem(path, whole) for path, whole in cut if whole is not None]


def is_incomplete(folder: Path) -> bool:
    """Return True if the folder has weights that cannot be loaded as they are.

    Return False for a folder without weights, because they may be downloaded later. Return False
    for pickled weights, because TensorRT-LLM's own tools can read them.
    """
    has_some = bool(find_weights(folder)) or find_gguf(folder) is not None
    has_pickles = any(folder.glob(_PICKLES))
    return has_some and not has_pickles and bool(weight_problems(folder))


def _read_shard_names(index: Path) -> list[str]:
    """Return the names of the weight files in an index, sorted.

    Raise ValueError if the index is invalid.
    """
    with index.open("rb") as file:
        raw = file.read(_MAX_INDEX_BYTES + 1)
    if len(raw) > _MAX_INDEX_BYTES:
        raise ValueError(f"is larger than {_MAX_INDEX_BYTES} bytes")
    try:
        names = json.loads(raw)["weight_map"].values()
        shards = sorted(set(names))
    except (ValueError, RecursionError, LookupError, TypeError, AttributeError):
        raise ValueError("is no JSON object with a `weight_map` of tensors to files") from None
    if not all(isinstance(name, str) and Path(name).name == name for name in shards):
        raise ValueError("names a file outside of its folder in its `weight_map`")
    return shards


def _expected_size_if_truncated(path: Path) -> int | None:
    """Return the size in bytes that a truncated safetensors file should have by its header.

    Return None if the file is not truncated. Also return None if the header is invalid: the program
    that loads the weights reports this error.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            data = 8 + int.from_bytes(file.read(8), "little")
            if data > min(size, _MAX_HEADER_BYTES):
                return data if size < data <= _MAX_HEADER_BYTES else None
            tensors = json.loads(file.read(data - 8))
        ends = [tensor["data_offsets"][1] for name, tensor in tensors.items() if name != _METADATA]
        expected = data + int(max(ends, default=0))
    except (OSError, ValueError, RecursionError, LookupError, TypeError, AttributeError):
        return None
    return expected if size < expected else None


def _truncated_problem(path: Path, whole: int) -> FileProblem:
    found = f"{path} was cut: it has {path.stat().st_size} of {whole} bytes by its header"
    return FileProblem(found, "download it again")


def _missing_problem(folder: Path, missing: list[str], count: int) -> FileProblem:
    shown = ", ".join(missing[:_SHOWN])
    more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
    return FileProblem(
        f"{folder / missing[0]} is missing: {INDEX} names {count} files of weights, and "
        f"{len(missing)} of them are not there ({shown}{more})",
        "download them again",
    )


def _no_weights_problem(folder: Path) -> FileProblem:
    if (name := find_gguf(folder)) is not None:
        return _problem(folder / name, GGUF)
    pickled = next((path for path in sorted(folder.glob(_PICKLES))), None)
    if pickled is not None:
        return _problem(pickled, kind_of_file(pickled) or PICKLE)
    return FileProblem(f"{folder} has no {_WEIGHTS}", "download the model's weights into it")


def _foreign_problems(folder: Path, names: Iterable[str]) -> list[FileProblem]:
    kinds = ((folder / name, kind_of_file(folder / name)) for name in names)
    return [_problem(path, kind) for path, kind in kinds if kind is not None]


def _problem(path: Path, kind: FileKind) -> FileProblem:
    return FileProblem(f"{path} is {kind.name}", kind.fix)

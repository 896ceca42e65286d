"""Reader of model.yaml, the configuration file of an llmapi model.

The file has the arguments of TensorRT-LLM's `LLM` (fields of `LlmArgs`), and under `triton_config`
the settings of the repository's model.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gateway.config.marked_yaml import MarkedYaml, YamlProblem

MODEL_YAML = "model.yaml"
LLM_CONFIG_PATH = "LLM_CONFIG_PATH"
"""Environment variable of Triton with the path of a file that replaces model.yaml.

The path is relative to the model's version folder.
"""
TRITON_CONFIG = "triton_config"
_PARALLEL = ("tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size")


class LlmapiYamlError(ValueError):
    """A model.yaml cannot be read or parsed. The message has the path, the line and the reason."""


@dataclass(frozen=True, slots=True)
class LlmapiYaml:
    """A parsed model.yaml, whose top level is a mapping."""

    path: Path
    document: MarkedYaml

    def get(self, *keys: str) -> Any:
        """Return the value at a path of keys; None if it is null or absent."""
        value = self.document.data
        for name in keys:
            value = value.get(name) if isinstance(value, dict) else None
        return value

    def has(self, *keys: str) -> bool:
        around = self.get(*keys[:-1]) if len(keys) > 1 else self.document.data
        return isinstance(around, dict) and keys[-1] in around

    def count(self, *keys: str) -> int | None:
        """Return the integer at a path of keys; None if it is absent or not an integer."""
        found = self.get(*keys)
        return found if isinstance(found, int) and not isinstance(found, bool) else None

    def at(self, *keys: str) -> str:
        """Return the file and line of the value at a path of keys, as FILE:LINE.

        If the value is absent, return the line of the closest enclosing mapping that exists.
        """
        return f"{self.path.name}:{self.document.find_line(keys)}"

    @property
    def is_ours(self) -> bool:
        """True if the file belongs to this project's llmapi repository, not to upstream's."""
        return self.has(TRITON_CONFIG, "behaves_as")

    @property
    def world_size(self) -> int:
        """Number of GPUs of one engine. The LLM API runs one process per GPU."""
        return math.prod(self.count(name) or 1 for name in _PARALLEL)


def read_llmapi_yaml(version: Path, named: str | None = None) -> LlmapiYaml:
    """Read the model.yaml of a version folder, or the file that LLM_CONFIG_PATH names.

    Args:
        version: the version folder.
        named: value of LLM_CONFIG_PATH; None or "" if unset.

    Raises LlmapiYamlError if the file cannot be read or has no mapping at the top level.
    """
    path = version / (named or MODEL_YAML)
    try:
        document = MarkedYaml(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise LlmapiYamlError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise LlmapiYamlError(f"{path}: not UTF-8") from error
    except YamlProblem as problem:
        raise LlmapiYamlError(f"{path}:{problem.line}: {problem.message}") from problem
    if not isinstance(document.data, dict):
        raise LlmapiYamlError(f"{path}:1: found no names with values")
    return LlmapiYaml(path, document)

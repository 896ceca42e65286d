"""Reader of adapters in PEFT's format: ``adapter_config.json`` and ``adapter_model.safetensors``.

This module checks everything that does not depend on a base model. `adapters.convert` checks later
that the adapter fits a base model. The fields of ``adapter_config.json`` are interpreted as those
of `LoraConfig` in PEFT 0.21.
"""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from adapters.adapter import Adapter, LoraSettings
from adapters.errors import (
    AdapterError,
    CorruptFile,
    IncompleteAdapter,
    InvalidRank,
    MissingFile,
    PathEscape,
    PickleRefused,
    TooLarge,
    UnsupportedFeature,
    UnsupportedModule,
)
from adapters.file_kinds import GGUF, HEAD_BYTES, find_gguf, kind_of, kind_of_file
from adapters.file_kinds import PICKLE as PICKLED
from adapters.patterns import ALLOWED, ModulePattern, NotAllowed
from adapters.safetensors import read_header

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PICKLE = "adapter_model.bin"
MAX_ADAPTER_BYTES = 2 * 1024**3
_MAX_CONFIG_BYTES = 4 * 1024 * 1024
_MAX_RANK = 2**31 - 1
"""Largest allowed rank. Engines store the rank as an int32."""

# fmt: off
_READ_BELOW = frozenset({
    "alpha_pattern", "base_model_name_or_path", "bias", "init_lora_weights", "lora_alpha",
    "peft_type", "r", "rank_pattern", "swift_type", "target_modules", "task_type", "use_rslora",
})
# Settings of the training, which do not affect the saved weights.
_TRAINING = frozenset({
    "auto_mapping", "corda_config", "ensure_weight_tying", "eva_config", "exclude_modules",
    "fan_in_fan_out", "inference_mode", "layers_pattern", "layers_to_transform", "loftq_config",
    "lora_dropout", "lora_ga_config", "megatron_core", "peft_version", "qalora_group_size",
    "revision", "runtime_config",
    # Settings of the training program ms-swift. `enable_lora` has the trained parts of a fused
    # layer. The other settings are the data type in training and learning rates.
    "enable_lora", "lora_dtype", "lorap_emb_lr", "lorap_lr_ratio",
})
# fmt: on
_REFUSED = {
    "use_dora": "DoRA needs magnitudes that lora_config [1, rows, 3] cannot carry",
    "modules_to_save": "complete modules cannot be sent with a request",
    "trainable_token_indices": "there is no LoRA module id for embeddings",
    "lora_bias": "a LoRA row holds A and B only",
    "layer_replication": "the engine has the base model's own layers",
    "target_parameters": "parameters without a module have no LoRA module id",
    "use_merged_linear": "ms-swift saves merged layers in a form of its own",
    "use_qa_lora": "ms-swift's QA-LoRA pools the input in front of A",
}
# Values of init_lora_weights with which PEFT leaves the base weights unchanged. With other values,
# PEFT changes the base weights when it creates the adapter, for example by subtracting the initial
# LoRA product. The adapter then fits only the changed weights. If PEFT has converted such an
# adapter to a plain LoRA, the value is `true`.
_PLAIN_INIT = (True, False, "gaussian", "eva", "orthogonal", None)
_EMBEDDINGS = frozenset(["embed_tokens", "lm_head", "wte", "wpe", "embed_in", "embed_out"])
_MAX_PATTERNS = 4096
_MAX_PATTERN_CHARACTERS = 256 * 1024

_Number = TypeVar("_Number", int, float)


def read(
    folder: Path, *, within: Path | None = None, max_bytes: int = MAX_ADAPTER_BYTES
) -> Adapter:
    """Read and validate the two files in `folder`. The values of the weights are not read yet.

    Args:
        within: folder in which every file must lie after resolving symbolic links.
        max_bytes: limit of the weights file's size in bytes.

    Raise a subclass of `AdapterError` if a file is missing, invalid, too large, or not supported.
    """
    config = _read_config(folder, within)
    settings = _settings(config)
    if not os.path.lexists(folder / WEIGHTS):
        raise _no_weights_error(folder)
    path = resolve_file(folder, WEIGHTS, within)
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            if status.st_size > max_bytes:
                raise TooLarge(WEIGHTS, "size", f"{status.st_size} bytes", f"{max_bytes} bytes")
            tensors = read_header(file, WEIGHTS, status.st_size)
    except OSError as error:
        raise MissingFile(WEIGHTS, "file", error.strerror, "a readable file") from error
    if not tensors:
        raise IncompleteAdapter(WEIGHTS, "tensors", "none", "lora_A and lora_B tensors")
    return Adapter(settings, path, file_identity(status), tensors)


def _no_weights_error(folder: Path) -> AdapterError:
    """Return the error for a folder without safetensors weights.

    If the folder has weights in another format, the message names them.
    """
    if (folder / PICKLE).exists():
        kind = kind_of_file(folder / PICKLE) or PICKLED
        says = f"{kind.words}; {WEIGHTS} is what is read"
        return PickleRefused(PICKLE, "format", kind.name, WEIGHTS, says=says)
    if (folder / f"{WEIGHTS}.index.json").exists():
        says = f"the weights are in several files; save the adapter as one {WEIGHTS}"
        return MissingFile(f"{WEIGHTS}.index.json", "format", "shards", WEIGHTS, says=says)
    if (name := find_gguf(folder)) is not None:
        return MissingFile(name, "format", "GGUF", WEIGHTS, says=GGUF.words)
    return _missing_file_error(WEIGHTS)


def _missing_file_error(name: str) -> MissingFile:
    """Return the error for a missing file.

    The message does not name the folder, which may be a temporary folder of the gateway.
    """
    says = f"the adapter has no such file; PEFT's save_pretrained writes {CONFIG} and {WEIGHTS}"
    return MissingFile(name, "file", "not there", name, says=says)


def refuse_other_kind(name: str, head: bytes) -> None:
    """Raise `CorruptFile` if the first bytes of a text file show another format."""
    if (kind := kind_of(head)) is not None:
        raise CorruptFile(name, "content", kind.name, name, says=kind.words)


def file_identity(status: os.stat_result) -> tuple[int, int, int]:
    """Return (inode, size, mtime in ns), which changes when the file is replaced or modified."""
    return (status.st_ino, status.st_size, status.st_mtime_ns)


def resolve_file(folder: Path, name: str, within: Path | None) -> Path:
    """Return the path of the file ``folder/name`` after resolving symbolic links.

    Raise `PathEscape` if the resolved path is outside the folder `within`. Raise `MissingFile` if
    the path does not lead to a regular file.
    """
    path = folder / name
    try:
        real = path.resolve(strict=True)
        regular = stat.S_ISREG(real.stat().st_mode)
    except FileNotFoundError as error:
        raise _missing_file_error(name) from error
    except OSError as error:
        raise MissingFile(name, "file", error.strerror, "a readable file") from error
    if within is not None and not real.is_relative_to(within.resolve()):
        says = "is a link that leads out of the adapters' folder; put the file itself there"
        raise PathEscape(name, "path", str(path), f"inside {within}", says=says)
    if not regular:
        raise MissingFile(name, "file", "not a regular file", "a regular file")
    return real


def _read_config(folder: Path, within: Path | None) -> dict[str, Any]:
    path = resolve_file(folder, CONFIG, within)
    size = path.stat().st_size
    if size > _MAX_CONFIG_BYTES:
        raise TooLarge(CONFIG, "size", f"{size} bytes", f"{_MAX_CONFIG_BYTES} bytes")
    try:
        raw = path.read_bytes()
        refuse_other_kind(CONFIG, raw[:HEAD_BYTES])
        config = json.loads(raw)
    except OSError as error:
        raise MissingFile(CONFIG, "file", error.strerror, "a readable file") from error
    except (ValueError, RecursionError) as error:
        raise CorruptFile(CONFIG, "content", error, "a JSON object") from error
    if not isinstance(config, dict):
        raise CorruptFile(CONFIG, "content", type(config).__name__, "a JSON object")
    return config


def _settings(config: dict[str, Any]) -> LoraSettings:
    _check_kind(config)
    _check_features(config)
    _check_targets(config.get("target_modules"))
    base = config.get("base_model_name_or_path")
    if base is not None and not isinstance(base, str):
        raise _build_error(CorruptFile, "base_model_name_or_path", base, "a string or null")
    return LoraSettings(
        r=_rank("r", config.get("r")),
        lora_alpha=_alpha("lora_alpha", config.get("lora_alpha")),
        use_rslora=_flag(config, "use_rslora"),
        rank_pattern=_patterns(config, "rank_pattern", _rank),
        alpha_pattern=_patterns(config, "alpha_pattern", _alpha),
        base_model_name_or_path=base or None,
    )


def _check_kind(config: dict[str, Any]) -> None:
    if config.get("peft_type") != "LORA":
        raise _build_error(UnsupportedFeature, "peft_type", config.get("peft_type"), "LORA")
    if config.get("task_type") not in (None, "CAUSAL_LM"):
        raise _build_error(
            UnsupportedFeature, "task_type", config["task_type"], "CAUSAL_LM or null"
        )
    if config.get("swift_type") not in (None, "LORA"):
        raise _build_error(UnsupportedFeature, "swift_type", config["swift_type"], "LORA or null")
    if config.get("bias") not in (None, "none"):
        raise _build_error(UnsupportedFeature, "bias", config["bias"], "none or null")
    init = config.get("init_lora_weights")
    if not any(init is plain or init == plain for plain in _PLAIN_INIT):
        raise _build_error(
            UnsupportedFeature,
            "init_lora_weights",
            init,
            "true, false, gaussian, eva or orthogonal",
            "it changes the base weights; save with path_initial_model_for_weight_conversion",
        )


def _check_features(config: dict[str, Any]) -> None:
    for field, value in config.items():
        if not value or field in _READ_BELOW or field in _TRAINING:
            continue
        why = _REFUSED.get(field, "not known to leave the LoRA weights' meaning as it is")
        raise _build_error(UnsupportedFeature, field, value, "unset", why)


def _check_targets(targets: Any) -> None:
    named = targets if isinstance(targets, list) else []
    for target in named:
        if isinstance(target, str) and target.rsplit(".", 1)[-1] in _EMBEDDINGS:
            raise _build_error(
                UnsupportedModule,
                "target_modules",
                target,
                "projections of the transformer layers",
                "there is no LoRA module id for embeddings and lm_head",
            )


def _flag(config: dict[str, Any], field: str) -> bool:
    value = config.get(field, False)
    if not isinstance(value, bool) and value is not None:
        raise _build_error(CorruptFile, field, value, "true or false")
    return bool(value)


def _rank(field: str, value: Any) -> int:
    if type(value) is float and value.is_integer():
        value = int(value)
    if type(value) is not int or not 1 <= value <= _MAX_RANK:
        raise _build_error(InvalidRank, field, value, f"an integer from 1 to {_MAX_RANK}")
    return value


def _alpha(field: str, value: Any) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool):
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if math.isfinite(number):
            return number
    raise _build_error(CorruptFile, field, value, "a finite number")


def _patterns(
    config: dict[str, Any], field: str, check: Callable[[str, Any], _Number]
) -> tuple[tuple[ModulePattern, _Number], ...]:
    patterns = config.get(field) or {}
    if not isinstance(patterns, dict) or len(patterns) > _MAX_PATTERNS:
        raise _build_error(
            CorruptFile, field, patterns, f"an object of up to {_MAX_PATTERNS} entries"
        )
    characters = sum(map(len, patterns))
    if characters > _MAX_PATTERN_CHARACTERS:
        allowed = f"{_MAX_PATTERN_CHARACTERS} characters in all keys"
        raise _build_error(TooLarge, field, f"{characters} characters", allowed)
    return tuple(
        (_compile(field, key), check(f"{field}[{key!r}]", value)) for key, value in patterns.items()
    )


def _compile(field: str, key: str) -> ModulePattern:
    try:
        return ModulePattern.compile(key)
    except NotAllowed as error:
        raise _build_error(UnsupportedFeature, field, key, ALLOWED) from error
    except ValueError as error:
        raise _build_error(CorruptFile, field, key, f"a regular expression: {error}") from error


def _build_error(
    kind: type[AdapterError], field: str, found: Any, allowed: object, why: str = ""
) -> AdapterError:
    return kind(CONFIG, field, found, allowed, why)

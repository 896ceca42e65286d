"""Comparison of base model names.

Names are compared as ids of the Hugging Face Hub, case-insensitively. The owner counts only if both
names have one, because a folder has none. The suffix of a copy that was quantized for training is
ignored. Nothing else is ignored: sizes, releases and `-Instruct` distinguish models.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

_UNSAFE = frozenset("\\'\"`$")
MAX_NAME_CHARACTERS = 4096
"""Longest path on Linux. Bounds the work: each name is compared with each alias."""
MAX_ALIASES = 32
MAX_ALIAS_CHARACTERS = 128
# Longest first. Left out on purpose: GGUF and MLX, which PEFT does not train; `4bit` alone; and
# QAT, whose weights were trained separately.
_QUANTIZATIONS = (
    *("unsloth-bnb-4bit", "bnb-4bit", "bnb-8bit", "bnb-nf4"),
    *("gptq-int4", "gptq-int8", "gptq", "awq-int4", "awq", "int4", "int8"),
    *("fp8-dynamic", "fp8", "nvfp4", "fp4"),
    *("quantized.w4a16", "quantized.w8a16", "quantized.w8a8"),
)


def model_id(name_or_path: str) -> tuple[str | None, str]:
    """Return (owner, name) in lower case. A path yields its last component and no owner."""
    owner, name = _split(name_or_path)
    return (None if owner is None else owner.casefold()), name.casefold()


def _split(name_or_path: str) -> tuple[str | None, str]:
    """Return (owner, name) in the original spelling.

    A snapshot in the Hub's cache ends in a commit hash; the repository's id is returned for it.
    """
    # No regular expression: an adapter's author chooses this text, which may fill the entire file.
    parts = name_or_path.strip().replace("\\", "/").rstrip("/").rsplit("/", 3)
    if len(parts) >= 3 and parts[-2] == "snapshots" and parts[-3].startswith("models--"):
        owner, found, name = parts[-3].removeprefix("models--").rpartition("--")
        return (owner if found else None), name
    if len(parts) == 2 and parts[0] and parts[0][0] not in ".~" and ":" not in parts[0]:
        return parts[0], parts[1]
    return None, parts[-1]


def split_quantization(name: str) -> tuple[str, str]:
    """Return the name without the suffix of a quantized copy, and that suffix or ""."""
    folded = name.casefold()
    for suffix in _QUANTIZATIONS:
        if folded.endswith(f"-{suffix}") and len(folded) > len(suffix) + 1:
            return name[: -len(suffix) - 1], name[-len(suffix) :]
    return name, ""


def is_same_model(one: str, other: str) -> bool:
    """Return True if both names, or paths, name one base model."""
    if max(len(one), len(other)) > MAX_NAME_CHARACTERS:
        return False
    (owner, name), (other_owner, other_name) = model_id(one), model_id(other)
    if owner is not None and other_owner is not None and owner != other_owner:
        return False
    return split_quantization(name)[0] == split_quantization(other_name)[0]


def quantization_note(trained_on: str, names: Iterable[str]) -> str | None:
    """Return the note for an adapter of a quantized copy; None if `names` have that copy."""
    _, name = _split(trained_on)
    suffix = split_quantization(name)[1]
    if not suffix or name.casefold() in (model_id(each)[1] for each in names):
        return None
    return (
        f"the adapter was trained on weights quantized as {suffix} and is served on those of the "
        "engine: answers may differ a little from those in training"
    )


def suggested_alias(name_or_path: str) -> str | None:
    """Return the alias that makes `name_or_path` a name of the base model; None if none can."""
    owner, name = _split(name_or_path)
    name = split_quantization(name)[0]
    alias = name if owner is None else f"{owner}/{name}"
    return None if alias_problem(alias) else alias


def alias_problem(alias: str) -> str | None:
    """Return what is wrong with an alias; None for a good one."""
    if not alias:
        return "must not be empty"
    if len(alias) > MAX_ALIAS_CHARACTERS:
        return f"has {len(alias)} characters; at most {MAX_ALIAS_CHARACTERS} are allowed"
    parts = alias.split("/")
    if len(parts) > 2 or not all(parts) or not alias.isprintable() or alias != alias.strip():
        return "must be NAME or OWNER/NAME, as the Hugging Face Hub has them"
    if parts[0] in (".", "..", "~"):
        return "must be NAME or OWNER/NAME, not a path: a folder's name is enough"
    # Refusals show this alias for pasting into a shell, and the adapter's author chose the text.
    if not _UNSAFE.isdisjoint(alias):
        return f"must be without {' '.join(sorted(_UNSAFE))}"
    return None


def repeated_alias(aliases: Sequence[str]) -> int | None:
    """Return the index of the first alias that an earlier one makes needless."""
    known: set[str] = set()
    for index, alias in enumerate(aliases):
        stem = split_quantization(alias.casefold())[0]
        if stem in known:
            return index
        known.add(stem)
    return None

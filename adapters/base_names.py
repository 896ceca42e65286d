"""Comparison of the names of base models.

Names are compared as ids of the Hugging Face Hub, case-insensitively. Owners are compared only if
both names have an owner, because the name of a folder has none. A suffix such as ``-bnb-4bit``,
which marks a copy quantized for training, is ignored. All other parts of a name matter, because
sizes, releases and `-Instruct` distinguish models.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

_UNSAFE = frozenset("\\'\"`$")
MAX_NAME_CHARACTERS = 4096
"""Maximum length of a name that is compared. The limit keeps the time of a comparison short.

The value is the length of the longest path on Linux.
"""
MAX_ALIASES = 32
MAX_ALIAS_CHARACTERS = 128
# Suffixes in the names of quantized copies. The first matching suffix is removed from a name, so a
# suffix such as "unsloth-bnb-4bit" must come before its own ending "bnb-4bit". Three suffixes are
# left out on purpose: GGUF and MLX, because PEFT does not train such models, and QAT, because these
# weights were trained separately and are no copy. `4bit` without `bnb-` is not removed either.
_QUANTIZATIONS = (
    *("unsloth-bnb-4bit", "bnb-4bit", "bnb-8bit", "bnb-nf4"),
    *("gptq-int4", "gptq-int8", "gptq", "awq-int4", "awq", "int4", "int8"),
    *("fp8-dynamic", "fp8", "nvfp4", "fp4"),
    *("quantized.w4a16", "quantized.w8a16", "quantized.w8a8"),
)


def model_id(name_or_path: str) -> tuple[str | None, str]:
    """Return the owner and the name in a model id such as ``OWNER/NAME``, both in lower case.

    For a path, the owner is None, and the name is the last component of the path.
    """
    owner, name = _split(name_or_path)
    return (None if owner is None else owner.casefold()), name.casefold()


def _split(name_or_path: str) -> tuple[str | None, str]:
    """Return the owner and the name in a model id or path, without changing upper and lower case.

    The path of a snapshot in the Hub's local cache ends in a commit hash. For such a path, return
    the owner and the name of the repository.
    """
    # Split without a regular expression: the author of an adapter chooses this text, and a long
    # text could make the expression slow.
    parts = name_or_path.strip().replace("\\", "/").rstrip("/").rsplit("/", 3)
    if len(parts) >= 3 and parts[-2] == "snapshots" and parts[-3].startswith("models--"):
        owner, found, name = parts[-3].removeprefix("models--").rpartition("--")
        return (owner if found else None), name
    if len(parts) == 2 and parts[0] and parts[0][0] not in ".~" and ":" not in parts[0]:
        return parts[0], parts[1]
    return None, parts[-1]


def split_quantization(name: str) -> tuple[str, str]:
    """Split a name into (name without a quantization suffix, suffix).

    Without such a suffix, return (name, "").
    """
    folded = name.casefold()
    for suffix in _QUANTIZATIONS:
        if folded.endswith(f"-{suffix}") and len(folded) > len(suffix) + 1:
            return name[: -len(suffix) - 1], name[-len(suffix) :]
    return name, ""


def is_same_model(one: str, other: str) -> bool:
    """Return True if both names, or paths, belong to the same base model."""
    if max(len(one), len(other)) > MAX_NAME_CHARACTERS:
        return False
    (owner, name), (other_owner, other_name) = model_id(one), model_id(other)
    if owner is not None and other_owner is not None and owner != other_owner:
        return False
    return split_quantization(name)[0] == split_quantization(other_name)[0]


def quantization_note(trained_on: str, names: Iterable[str]) -> str | None:
    """Return a note for the operator if an adapter was trained on a quantized copy of its model.

    `trained_on` is the name of the model that the adapter was trained on. `names` are the names of
    the served model. Return None if `trained_on` has no quantization suffix. Also return None if
    `names` has the same name with the same suffix, because the served model is then this copy.
    """
    _, name = _split(trained_on)
    suffix = split_quantization(name)[1]
    if not suffix or name.casefold() in (model_id(each)[1] for each in names):
        return None
    return (
        f"the adapter was trained on weights quantized as {suffix} and is served on those of the "
        "engine: answers may differ a little from those in training"
    )


def suggested_alias(name_or_path: str) -> str | None:
    """Return an alias to suggest to the operator for the base model that is called `name_or_path`.

    With this alias in the settings, `name_or_path` is accepted as a name of the served base model.
    Return None if the alias would be invalid.
    """
    owner, name = _split(name_or_path)
    name = split_quantization(name)[0]
    alias = name if owner is None else f"{owner}/{name}"
    return None if alias_problem(alias) else alias


def alias_problem(alias: str) -> str | None:
    """Return the reason why an alias is invalid. Return None if the alias is valid.

    The reason is the end of a sentence that begins with the alias, such as "must not be empty".
    """
    if not alias:
        return "must not be empty"
    if len(alias) > MAX_ALIAS_CHARACTERS:
        return f"has {len(alias)} characters; at most {MAX_ALIAS_CHARACTERS} are allowed"
    parts = alias.split("/")
    if len(parts) > 2 or not all(parts) or not alias.isprintable() or alias != alias.strip():
        return "must be NAME or OWNER/NAME, as the Hugging Face Hub has them"
    if parts[0] in (".", "..", "~"):
        return "must be NAME or OWNER/NAME, not a path: a folder's name is enough"
    # Refuse shell metacharacters: operators may paste the alias into a shell, and the author of the
    # adapter chose the text.
    if not _UNSAFE.isdisjoint(alias):
        return f"must be without {' '.join(sorted(_UNSAFE))}"
    return None


def repeated_alias(aliases: Sequence[str]) -> int | None:
    """Return the index of the first alias that repeats an earlier alias.

    Return None if all aliases differ. Two aliases that differ only in a quantization suffix, or in
    upper and lower case, count as equal.
    """
    known: set[str] = set()
    for index, alias in enumerate(aliases):
        stem = split_quantization(alias.casefold())[0]
        if stem in known:
            return index
        known.add(stem)
    return None

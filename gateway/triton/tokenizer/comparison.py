"""Comparison of the gateway's tokenizer with Triton's and the engine's configuration."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from adapters.config_json import ConfigError
from adapters.engine_config import EngineConfig, read_engine_config
from gateway.triton.model_capabilities import parameter

TEXT = (
    "The quick brown fox jumps over 13 lazy dogs: 1234567890, 3.14 and 2^10!\n"
    "Größe naïve Ελληνικά Привет, мир. 你好，世界 こんにちは 안녕하세요 مرحبا שלום नमस्ते 😀🎉\n\n"
    "def f(x):\n    return {'a': [x]}  # tabs\tand   spaces\n"
)
"""Text whose token ids are compared. It has several scripts, digits, spaces and code."""

# Two limits for the number of embedding rows that no token uses: an absolute number, and a share of
# all rows. Unused rows are usual, because the number of rows is rounded up, for example to a
# multiple of 64. If an engine exceeds both limits, it was built for another vocabulary.
_MAX_PADDING_ROWS, _MAX_PADDING_SHARE = 1024, 0.025
# Maximum number of added tokens with ids above the engine's vocabulary. A few such tokens are
# harmless: for example, a padding token never occurs in an encoded text.
_MAX_SPARE_TOKENS = 64


class OwnTokenizer(Protocol):
    """Interface of the gateway's tokenizer. `vocab_size` is the highest token id plus 1."""

    @property
    def folder(self) -> Path: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def end_ids(self) -> Sequence[int]: ...

    @property
    def pad_id(self) -> int | None: ...

    @property
    def special_tokens(self) -> Mapping[str, int]: ...

    def encode(self, text: str, *, special: bool) -> list[int]:
        """Return the token ids of a text.

        If `special` is True, include the special tokens that the tokenizer adds to every text.
        """

    def are_added(self, first: int) -> bool:
        """Return True if all tokens whose id is `first` or higher are added tokens.

        Added tokens are not part of the tokenizer model's own vocabulary.
        """

    def difference_from(self, folder: Path, text: str) -> str | None:
        """Compare this tokenizer with the tokenizer in another folder.

        The comparison covers all tokens, and the token ids of `text`. Return a description of the
        first difference; None if there is no difference. Raise OSError or ValueError if the other
        tokenizer cannot be loaded.
        """


@dataclass
class Findings:
    """Results of a comparison.

    Attributes:
        compared: True if anything could be compared.
        differences: sentences about differences, which prove that Triton uses another tokenizer.
        doubts: sentences about unusual values, and about data that could not be compared.
    """

    compared: bool = False
    differences: list[str] = field(default_factory=list)
    doubts: list[str] = field(default_factory=list)


def read_engine(folder: Path, found: Findings) -> EngineConfig | None:
    """Return the content of the engine's config.json. Return None if it is missing or invalid.

    An invalid file is added to the doubts in `found`.
    """
    if folder == Path() or not (folder / "config.json").is_file():
        return None
    try:
        return read_engine_config(folder)
    except ConfigError as error:
        found.doubts.append(f"The engine's vocabulary is unknown: {error}.")
        return None


def size_difference(own: OwnTokenizer, engine: EngineConfig | None) -> str | None:
    """Return a sentence about the two vocabulary sizes if they do not fit each other.

    Return None if they fit, or if the engine's vocabulary size is unknown. They fit if the engine
    has an embedding row for each token, and not too many more. For example, 51,200 rows fit 50,295
    tokens.
    """
    size = 0 if engine is None else engine.vocab_size or 0
    padding = max(_MAX_PADDING_ROWS, int(_MAX_PADDING_SHARE * size))
    if not size or 0 <= size - own.vocab_size <= padding:
        return None
    return f"GATEWAY_TOKENIZER_DIR has {own.vocab_size} tokens, the engine {size}."


async def compare(
    own: OwnTokenizer, configs: Mapping[str, Any], engine: EngineConfig | None, found: Findings
) -> None:
    """Compare the tokenizer with the configurations of the models and the engine.

    Add differences and doubts to `found`.
    """
    found.compared = engine is not None and bool(engine.vocab_size)
    if size := size_difference(own, engine):
        extra = 0 if engine is None else own.vocab_size - (engine.vocab_size or 0)
        spare = 0 < extra <= _MAX_SPARE_TOKENS and own.are_added(own.vocab_size - extra)
        (found.doubts if spare else found.differences).append(size)
    for name, config in configs.items():
        ends, pads = (_decimals(parameter(config, key)) for key in ("end_id", "pad_id"))
        found.differences += _id_differences(own, f"Triton's {name!r}", ends, pads)
    if engine is not None:
        model = engine.raw_config.get("pretrained_config")
        model = model if isinstance(model, Mapping) else {}
        ends = _ids(model.get("eos_token_id"), model.get("end_id"))
        pads = _ids(model.get("pad_token_id"), model.get("pad_id"))
        found.differences += _id_differences(own, "The engine's config.json", ends, pads)
    folders = {parameter(config, "tokenizer_dir") for config in configs.values()} - {""}
    for folder in map(Path, sorted(folders)):
        if not await asyncio.to_thread(folder.is_dir):
            continue  # the folder is on another machine, or the value is a Hugging Face name
        try:
            differs = await asyncio.to_thread(own.difference_from, folder, TEXT)
        except (OSError, ValueError) as error:
            found.doubts.append(f"Triton's tokenizer_dir {folder} cannot be compared: {error}.")
        else:
            found.compared = True
            if differs is not None:
                found.differences.append(f"Triton's tokenizer_dir {folder} {differs}")


def _id_differences(
    own: OwnTokenizer, whose: str, ends: Sequence[int], pads: Sequence[int]
) -> list[str]:
    differences = []
    if ends and own.end_ids and not set(ends) & set(own.end_ids):
        differences.append(f"{whose} has end_id {list(ends)}; here: {list(own.end_ids)}.")
    # Accept an end id as the padding id, because many models use the same id for both.
    if pads and own.pad_id is not None and not set(pads) & {own.pad_id, *own.end_ids}:
        differences.append(f"{whose} has pad_id {list(pads)}; here: {own.pad_id}.")
    return differences


def _decimals(text: str) -> list[int]:
    return [int(text)] if text.isdecimal() else []


def _ids(*values: Any) -> list[int]:
    """Return all token ids in `values`. A value may be an id, a list of ids, or anything else."""
    flat = [each for value in values for each in (value if isinstance(value, list) else [value])]
    return [each for each in flat if isinstance(each, int) and not isinstance(each, bool)]

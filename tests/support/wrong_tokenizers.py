"""Tokenizer folders that differ from the demo's: other models' tokenizers, and a padded copy."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from tests.support.triton_server import MODEL

_FILES = ("tokenizer_config.json", "chat_template.jinja")
_CORPUS = ["It was a dark and stormy night; the rain fell in torrents.", "北京是中国的首都。"] * 3


def _definition() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((MODEL / "tokenizer.json").read_text(encoding="utf-8"))
    return found


def _train(size: int) -> Tokenizer:
    """Train a tokenizer on other texts, and pad it to `size` tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    missing = size - tokenizer.get_vocab_size()
    tokenizer.add_tokens([AddedToken(f"<filler {n}>", special=True) for n in range(missing)])
    return tokenizer


def _with_change(change: Callable[[dict[str, Any]], None]) -> Tokenizer:
    definition = _definition()
    change(definition)
    return Tokenizer.from_str(json.dumps(definition))


def _reversed_ids(definition: dict[str, Any]) -> None:
    """Reverse the ids of all words except special tokens."""
    vocabulary = definition["model"]["vocab"]
    added = {each["content"] for each in definition["added_tokens"]}
    words = sorted((token for token in vocabulary if token not in added), key=vocabulary.get)
    ids = [vocabulary[word] for word in words]
    vocabulary |= dict(zip(words, reversed(ids), strict=True))


def _swapped_special(definition: dict[str, Any]) -> None:
    one, other = (
        next(each for each in definition["added_tokens"] if each["content"] == content)
        for content in ("<|im_start|>", "<|im_end|>")
    )
    one["id"], other["id"] = other["id"], one["id"]
    vocabulary = definition["model"]["vocab"]
    for each in (one, other):
        if each["content"] in vocabulary:
            vocabulary[each["content"]] = each["id"]


def _lower_case(definition: dict[str, Any]) -> None:
    definition["normalizer"] = {"type": "Lowercase"}


def _no_merges(definition: dict[str, Any]) -> None:
    definition["model"]["merges"] = definition["model"]["merges"][:1000]


WRONG: dict[str, Callable[[], Tokenizer]] = {
    "smaller": lambda: _train(1000),
    "half as large": lambda: _train(2048),
    "larger": lambda: _train(8000),
    "same size, other texts": lambda: _train(4096),
    "same size, other ids": lambda: _with_change(_reversed_ids),
    "same size, other special ids": lambda: _with_change(_swapped_special),
    "same size, lower case": lambda: _with_change(_lower_case),
    "same size, other merges": lambda: _with_change(_no_merges),
}


def write(folder: Path, tokenizer: Tokenizer) -> Path:
    """Write a folder with this tokenizer and the demo's other files. config.json has no ids."""
    folder.mkdir(parents=True)
    for name in _FILES:
        if (MODEL / name).is_file():
            shutil.copy(MODEL / name, folder / name)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def without_tool_tokens(folder: Path) -> Path:
    """Write the demo's tokenizer before tool tokens: four tokens fewer than the engine has rows."""

    def change(definition: dict[str, Any]) -> None:
        definition["added_tokens"] = [t for t in definition["added_tokens"] if t["id"] < 4092]

    return write(folder, _with_change(change))


def with_spare_token(folder: Path) -> Path:
    """Write the demo's tokenizer with a padding token, for which the engine has no row."""
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    tokenizer.add_special_tokens(["<pad>"])
    return write(folder, tokenizer)

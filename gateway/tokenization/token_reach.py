"""Lower bound of a text's number of tokens, which is computed without tokenizing the text.

Tokenizing takes some hundred bytes of memory and a microsecond of CPU per character. A text that is
certainly too long for the model's context is therefore refused without tokenizing it. If the
longest token has 20 characters and the context has 1,000 tokens, for example, any text of more than
20,000 characters is certainly too long.

The bound exists only for tokenizers that encode every character: byte-level tokenizers (Llama 3,
Qwen, GPT-2), and sentencepiece with byte fallback (Llama 2, Gemma). Other tokenizers drop white
space, or encode any number of unknown characters as one token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer, pre_tokenizers

# Pre-tokenizers that remove no characters, unless their `behavior` is "Removed".
_LOSSLESS_STEPS = {"ByteLevel", "Digits", "Metaspace", "Punctuation", "Split", "UnicodeScripts"}
# For each normalizer, the maximum number of characters that become one character. NFC and NFKC
# combine up to four characters. NFD and NFKD only split characters.
_SHRINK_FACTORS = {"NFC": 4, "NFKC": 4, "NFD": 1, "NFKD": 1, "Prepend": 1}


@dataclass(frozen=True, slots=True)
class TokenReach:
    """Maximum length of the text that one token of a tokenizer encodes.

    Attributes:
        chars: maximum number of characters.
        blanks: True if an added token also encodes the white space next to it, however much there
            is. `chars` then does not include white space.
    """

    chars: int
    blanks: bool = False

    def exceeds(self, text: str, tokens: int) -> bool:
        """Return True if `text` must have more than `tokens` tokens."""
        max_chars = self.chars * tokens
        if len(text) <= max_chars:
            return False
        return not self.blanks or len("".join(text.split())) > max_chars


def token_reach(tokenizer: Tokenizer, definition: dict[str, Any]) -> TokenReach | None:
    """Return the maximum number of characters per token. Return None if there is no maximum.

    `definition` is the content of tokenizer.json.
    """
    steps = _steps(definition.get("pre_tokenizer"), "pretokenizers")
    shrinking = _shrink_factor(_steps(definition.get("normalizer"), "normalizers"))
    byte_level = any(step["type"] == "ByteLevel" for step in steps)
    if (
        definition.get("truncation") is not None
        or shrinking is None
        or any(_removes(step) for step in steps)
        or not _covers_all_characters(definition["model"], byte_level=byte_level)
    ):
        return None
    added = definition["added_tokens"]
    texts = [*_tokens(definition["model"]), *(token["content"] for token in added)]
    if tokenizer.normalizer is not None:
        texts += [tokenizer.normalizer.normalize_str(token["content"]) for token in added]
    return TokenReach(
        chars=shrinking * max(map(len, texts)),
        blanks=any(token["lstrip"] or token["rstrip"] for token in added),
    )


def _steps(definition: dict[str, Any] | None, several: str) -> list[dict[str, Any]]:
    """Return the steps of a normalizer or pre-tokenizer, including the steps of nested sequences.

    `definition` is its JSON in tokenizer.json. `several` is the key under which a "Sequence" has
    its steps.
    """
    if definition is None:
        return []
    if definition["type"] != "Sequence":
        return [definition]
    return [step for each in definition[several] for step in _steps(each, several)]


def _removes(step: dict[str, Any]) -> bool:
    return step["type"] not in _LOSSLESS_STEPS or step.get("behavior") == "Removed"


def _shrink_factor(normalizers: list[dict[str, Any]]) -> int | None:
    """Return the maximum number of characters that normalization combines into one character.

    Return None if there is no maximum.
    """
    factor = 1
    for step in normalizers:
        if step["type"] == "Replace":
            pattern = step["pattern"].get("String")
            if pattern is None or len(step["content"]) < len(pattern):
                return None
        elif step["type"] in _SHRINK_FACTORS:
            factor *= _SHRINK_FACTORS[step["type"]]
        else:
            return None
    return factor


def _tokens(model: dict[str, Any]) -> list[str]:
    """Return the tokens of the tokenizer's model.

    In a byte-level vocabulary, a token has one character for each byte. The length of such a token
    is therefore at least the number of characters that it encodes.
    """
    if model["type"] == "Unigram":
        return [token for token, _ in model["vocab"]]
    return list(model["vocab"])


def _covers_all_characters(model: dict[str, Any], *, byte_level: bool) -> bool:
    """Return True if a tokenizer encodes every character of a text.

    Return False if it may drop characters, or encode several unknown characters as one token.
    """
    if model["type"] not in ("BPE", "Unigram"):
        return False
    tokens = set(_tokens(model))
    if byte_level:
        return tokens.issuperset(pre_tokenizers.ByteLevel.alphabet())
    if model["byte_fallback"]:
        return tokens.issuperset(f"<0x{byte:02X}>" for byte in range(256))
    return model["type"] == "BPE" and model["unk_token"] in tokens and not model["fuse_unk"]

"""Small tokenizers of the usual types, built on demand."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from gateway.tokenization.vocabulary import Vocabulary


def _byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the cat sat on the mat", "中文 中文", "日本語"], trainer)
    return tokenizer


def _halves() -> Tokenizer:
    """Return a byte tokenizer with a token that ends in the first byte of the next character."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*alphabet, "ãĥ", "ãĥ³", "ãĥ³ã"]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, []))
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _metaspace() -> Tokenizer:
    vocab = {"<unk>": 0, "<s>": 1, "▁the": 2, "▁cat": 3, "s": 4, "<0xE4>": 5, "<0xBD>": 6}
    vocab["<0xA0>"] = 7
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return tokenizer


BYTES = _byte_level()
HALVES = _halves()
PIECES = [HALVES.token_to_id(t) for t in ("ãĥ³ã", "ãĥ³", "ãĥ", "ã", "ĥ", "³", "ð", "Ł", "Q")]
SPACES = _metaspace()
EOS = BYTES.token_to_id("<eos>")
VOCABULARY = Vocabulary(BYTES)


def encode(text: str) -> list[int]:
    return list(BYTES.encode(text, add_special_tokens=False).ids)

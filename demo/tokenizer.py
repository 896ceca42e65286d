"""The demo model's tokenizer: byte-level BPE, trained on the generated corpus."""

import json
import re
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from demo.chat import TEMPLATE

VOCAB_SIZE = 4096
END_OF_TEXT, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
# Regular expression that splits text before BPE is applied. It is Qwen2's pattern with two changes:
# each digit is a separate part, and ", " before a digit is one part.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|, (?=\p{N})"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def train(texts: Iterable[str]) -> Tokenizer:
    """Train a tokenizer with ``VOCAB_SIZE`` tokens on ``texts``.

    The tokenizer does not add special tokens, such as a begin token, when it encodes a text.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])  # fmt: skip
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(TAGS),
        special_tokens=[END_OF_TEXT, IM_START, IM_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=24,
        show_progress=False,
    )
    # Leave emoji out of the training, so that an emoji becomes four tokens of one byte each. The
    # demo then shows that the gateway correctly streams a character whose bytes arrive separately.
    # Rare Chinese and Japanese characters become several tokens even if they are trained on.
    tokenizer.train_from_iterator((re.sub(r"[^\0-\uffff]", "", text) for text in texts), trainer)
    # Do not mark the tags as special tokens, as in Qwen2.5. Decoders omit special tokens, and the
    # tags of a tool call must appear in the decoded text.
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in TAGS])
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path, max_length: int) -> None:
    """Write the files of a Hugging Face tokenizer into ``folder``.

    ``max_length`` is the model's context length in tokens.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    tokens = {"bos_token": END_OF_TEXT, "eos_token": IM_END, "pad_token": END_OF_TEXT}
    added = tokenizer.get_added_tokens_decoder()
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": False,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
        **tokens,
        "unk_token": None,
        "additional_special_tokens": [IM_START, IM_END],
        "added_tokens_decoder": {
            str(number): {
                "content": token.content, "lstrip": False, "normalized": False, "rstrip": False,
                "single_word": False, "special": token.special,
            }
            for number, token in added.items()
        },
        "chat_template": TEMPLATE.read_text(encoding="utf-8"),
    }  # fmt: skip
    for name, content in (("tokenizer_config", config), ("special_tokens_map", tokens)):
        text = json.dumps(content, ensure_ascii=False, indent=2)
        (folder / f"{name}.json").write_text(text + "\n", encoding="utf-8")

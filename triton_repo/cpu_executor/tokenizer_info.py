"""What ``GuidedDecodingConfig`` needs to know about a tokenizer."""

from __future__ import annotations

from typing import Any


def xgrammar_tokenizer_info(tokenizer: Any) -> dict[str, Any]:
    """``_xgrammar_tokenizer_info`` of ``tensorrt_llm.llmapi.tokenizer`` (TensorRT-LLM v0.19).

    Takes a fast tokenizer of transformers. Returns ``encoded_vocab`` (the tokens in order of
    id), ``tokenizer_str`` (its ``tokenizer.json``) and ``stop_token_ids`` (its EOS). Raises
    ``ValueError`` for any other tokenizer and for one without EOS.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ValueError(f"Unsupported tokenizer type: {type(tokenizer)}")
    if tokenizer.eos_token_id is None:
        raise ValueError("the tokenizer has no eos_token, so a complete grammar could not end")
    vocab = tokenizer.get_vocab()
    return {
        "encoded_vocab": sorted(vocab, key=vocab.__getitem__),
        "tokenizer_str": backend.to_str(),
        "stop_token_ids": [tokenizer.eos_token_id],
    }

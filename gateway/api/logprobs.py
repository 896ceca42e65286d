"""Log probabilities in the forms of the two endpoints."""

from __future__ import annotations

from typing import Any

from gateway.deltas import TokenLogprob
from gateway.tokenization.prompts import Prompts


def chat_logprobs(entries: list[TokenLogprob], prompts: Prompts) -> dict[str, Any]:
    """`logprobs` of a chat choice or chunk."""
    content = []
    for entry in entries:
        assert entry.logprob is not None, "a chat does not echo its prompt"
        token = _chat_token(entry.token_id, entry.logprob, prompts)
        token["top_logprobs"] = [_chat_token(i, value, prompts) for i, value in entry.top]
        content.append(token)
    return {"content": content, "refusal": None}


def _chat_token(token_id: int, logprob: float, prompts: Prompts) -> dict[str, Any]:
    raw = prompts.vocabulary.token_bytes(token_id)
    return {"token": _text(raw), "logprob": logprob, "bytes": list(raw)}


def completion_logprobs(entries: list[TokenLogprob], prompts: Prompts) -> dict[str, Any]:
    """`logprobs` of a completion choice or chunk; `text_offset` counts characters of the text."""
    token_bytes = prompts.vocabulary.token_bytes
    return {
        "tokens": [_text(token_bytes(entry.token_id)) for entry in entries],
        "token_logprobs": [entry.logprob for entry in entries],
        "top_logprobs": [
            {_text(token_bytes(token_id)): value for token_id, value in entry.top}
            for entry in entries
        ],
        "text_offset": [entry.text_offset for entry in entries],
    }


def _text(raw: bytes) -> str:
    """A token as text; part of a character is written as OpenAI does, `bytes:` and hex."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

"""Conversion of tokens' log probabilities to the members `logprobs` and `prompt_logprobs`.

The formats are those of OpenAI's chats and completions, and of vLLM's `prompt_logprobs`.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from gateway.deltas import TokenLogprob
from gateway.tokenization.prompts import Prompts


def build_chat_logprobs(
    entries: list[TokenLogprob], prompts: Prompts, *, as_ids: bool
) -> dict[str, Any]:
    """Return the `logprobs` of a chat choice or chunk.

    `as_ids` writes each token as `token_id:N` instead of text.
    """

    def describe(token_id: int, logprob: float) -> dict[str, Any]:
        raw = prompts.vocabulary.token_bytes(token_id)
        token = _format_id(token_id) if as_ids else _decode(raw)
        return {"token": token, "logprob": logprob, "bytes": list(raw)}

    content = []
    for entry in entries:
        assert entry.logprob is not None, "a chat does not echo its prompt"
        token = describe(entry.token_id, entry.logprob)
        token["top_logprobs"] = [describe(i, value) for i, value in entry.top]
        content.append(token)
    return {"content": content, "refusal": None}


def build_completion_logprobs(
    entries: list[TokenLogprob], prompts: Prompts, *, as_ids: bool
) -> dict[str, Any]:
    """Return the `logprobs` of a completion choice or chunk.

    `as_ids` writes each token as `token_id:N` instead of text. `text_offset` counts characters.
    `top_logprobs` includes the chosen token even if no alternatives were requested. The first token
    of an echoed prompt has null instead of log probabilities.
    """
    describe = _format_id if as_ids else partial(_token_text, prompts)
    tokens, top = [], []
    for entry in entries:
        token = describe(entry.token_id)
        tokens.append(token)
        likeliest = {describe(token_id): value for token_id, value in entry.top}
        top.append(None if entry.logprob is None else likeliest | {token: entry.logprob})
    return {
        "tokens": tokens,
        "token_logprobs": [entry.logprob for entry in entries],
        "top_logprobs": top,
        "text_offset": [entry.text_offset for entry in entries],
    }


def build_prompt_logprobs(
    entries: list[TokenLogprob], prompts: Prompts, *, count: int
) -> list[dict[str, Any] | None]:
    """Return `prompt_logprobs` in vLLM's format.

    The list has a dict for each token of the prompt. The dict maps the ids of this token and of the
    `count` likeliest tokens to their log probabilities, ranks and texts. The first token has null
    instead of a dict, as no token precedes it.
    """
    found: list[dict[str, Any] | None] = []
    for entry in entries:
        if entry.logprob is None:
            found.append(None)
            continue
        ranked = {entry.token_id: (entry.logprob, entry.rank)}
        ranked |= {i: (value, rank) for rank, (i, value) in enumerate(entry.top[:count], 1)}
        found.append(
            {
                str(i): {"logprob": value, "rank": rank, "decoded_token": _token_text(prompts, i)}
                for i, (value, rank) in ranked.items()
            }
        )
    return found


def _format_id(token_id: int) -> str:
    """Return `token_id:N`, as vLLM writes a token for `return_tokens_as_token_ids`."""
    return f"token_id:{token_id}"


def _token_text(prompts: Prompts, token_id: int) -> str:
    return _decode(prompts.vocabulary.token_bytes(token_id))


def _decode(raw: bytes) -> str:
    """Return the bytes of a token as text.

    A token may be only a part of a character, so its bytes may not be valid UTF-8. Such bytes are
    written as `bytes:` and hex escapes, as OpenAI does.
    """
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

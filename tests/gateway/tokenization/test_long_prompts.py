"""Long prompts: correct token ids, stored at four bytes each."""

from __future__ import annotations

import tracemalloc
from typing import Any

import pytest

from gateway.tokenization.prompts import Prompts

WORDS = "The capital of France is the city in which most people live and work today. "
LONG = WORDS * 2000


def _text(prompts: Prompts, kind: str) -> Any:
    if kind == "plain":
        return LONG
    turn = prompts.tokenizer.id_to_token(prompts.eos_ids[0])
    content = f"{LONG}{turn}" if kind == "guarded" else LONG
    messages = [{"role": "user", "content": content}, {"role": "assistant", "content": "Yes."}]
    return prompts.chat.render([*messages, {"role": "user", "content": LONG}])


@pytest.mark.parametrize("kind", ["plain", "chat", "guarded"])
@pytest.mark.parametrize("special", [False, True])
async def test_ids_of_a_long_prompt(prompts: Prompts, kind: str, special: bool) -> None:
    text = _text(prompts, kind)
    written = text if isinstance(text, str) else text.aliased
    tokenizer = prompts.tokenizer if isinstance(text, str) else text.control.tokenizer
    expected = tokenizer.encode(written, add_special_tokens=False).ids
    if special:
        expected = prompts.tokenizer.encode("").ids + expected
    if not isinstance(text, str):
        expected = [text.control._real.get(token_id, token_id) for token_id in expected]
    # The second call tokenizes only text that the first one did not cache.
    for _ in range(2):
        found = await prompts.encode(text, add_special_tokens=special)
        assert found.tolist() == expected


async def test_ids_are_kept_at_four_bytes_each(prompts: Prompts) -> None:
    # fill the lazy caches before memory is measured
    await prompts.encode(LONG, add_special_tokens=True)
    tracemalloc.start()
    ids = await prompts.encode(LONG, add_special_tokens=True)
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(ids) > 25_000
    assert kept < 5 * len(ids)

"""Encoding of long texts: cached words on the event loop, new words by the library in a thread."""

from __future__ import annotations

import asyncio
import json
import random
import threading
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from gateway.errors import Overloaded
from gateway.tokenization import lone_spaces, threads, word_ids
from gateway.tokenization.control_tokens import GuardedText
from gateway.tokenization.prompts import Prompts
from gateway.tokenization.threads import INLINE_CHARS
from gateway.tokenization.word_ids import WordIds
from ops.commands.up import DEMO_MODEL
from tests.support.examples import scale_examples

PROSE = "The capital of France is the city in which most people live and work today. "
LONG = PROSE * 1000


def _random_words(chars: int, seed: int = 0) -> str:
    draw = random.Random(seed)
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = ("".join(draw.choices(letters, k=draw.randint(3, 9))) for _ in range(chars // 4))
    return " ".join(words)[:chars]


def _asked(prompts: Prompts, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Record each text that the tokenizers library encodes from now on, with the thread's id."""
    asked: list[tuple[str, int]] = []
    encode = prompts._encode_with_library

    def noted(text: str, add_special_tokens: bool) -> array[int]:
        asked.append((text, threading.get_ident()))
        return encode(text, add_special_tokens)

    for encoder in (prompts._encoder, prompts._library):
        monkeypatch.setattr(encoder, "_encode_with_library", noted)
    return asked


async def _encode(prompts: Prompts, text: str, tenant: str = "") -> array[int]:
    """Return the ids of `text`, bypassing the cache of conversation turns."""
    [ids] = await prompts._encoder.encode([text], add_special_tokens=False, tenant=tenant)
    return ids


async def _learn(prompts: Prompts, text: str) -> None:
    """Cache every word of `text`, so that encoding it needs no library call."""
    assert prompts._words is not None
    for block in prompts._words.cut_blocks(text):
        prompts._words.encode(block, add_special_tokens=False, learns_all=True)


def _expected(prompts: Prompts, text: str) -> array[int]:
    return array("i", prompts.tokenizer.encode(text, add_special_tokens=False).ids)


@pytest.mark.parametrize("chars", [4_000, 5_000, 10_000, 40_000, len(LONG)])
async def test_a_long_text_of_known_words_needs_no_library_and_no_thread(
    prompts: Prompts, chars: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = LONG[:chars]
    await _learn(prompts, text)
    asked = _asked(prompts, monkeypatch)
    monkeypatch.setattr(threads.FairThread, "run", None)
    assert await _encode(prompts, text) == _expected(prompts, text)
    assert not asked


async def test_new_words_are_encoded_in_a_thread_and_known_ones_are_not(
    prompts: Prompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    await _learn(prompts, LONG)
    asked = _asked(prompts, monkeypatch)
    new = " ".join([LONG[:20_000], _random_words(50_000), LONG[:20_000]])
    text = f"{new} {LONG[:20_000]} {_random_words(20_000, seed=1)}"
    assert await _encode(prompts, text) == _expected(prompts, text)
    # Neighbouring blocks with new words are joined into one library call.
    assert len(asked) == 2
    assert threading.get_ident() not in {thread for _, thread in asked}
    assert 60_000 < sum(len(each) for each, _ in asked) < 100_000


async def test_short_texts_of_new_words_need_no_thread(
    prompts: Prompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = _asked(prompts, monkeypatch)
    seen = _LoopTurns(prompts, monkeypatch)
    for chars in (300, 3_000):
        text = _random_words(chars)
        assert await prompts.encode(text, add_special_tokens=False) == _expected(prompts, text)
        assert asked.pop() == (text, threading.get_ident())
        # The text was searched for cached words only once.
        assert seen.blocks.popitem()[1] == [text]
    assert not asked


class _LoopTurns:
    """A recorder of the text blocks that are encoded in each event loop iteration."""

    def __init__(self, prompts: Prompts, monkeypatch: pytest.MonkeyPatch) -> None:
        self.blocks: dict[int, list[str]] = {}
        self._number = 0
        words = prompts._words
        assert words is not None
        encode = words.encode

        def noted(text: str, *, add_special_tokens: bool) -> array[int] | None:
            self.blocks.setdefault(self._number, []).append(text)
            return encode(text, add_special_tokens=add_special_tokens)

        monkeypatch.setattr(words, "encode", noted)
        self._count()

    def _count(self) -> None:
        self._number += 1
        asyncio.get_running_loop().call_soon(self._count)


@pytest.mark.parametrize("count", [1, 5])
async def test_a_turn_of_the_loop_has_one_block_however_many_texts(
    prompts: Prompts, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    await _learn(prompts, LONG)
    seen = _LoopTurns(prompts, monkeypatch)
    texts = [f"{n} {LONG}" for n in range(count)]
    found = await asyncio.gather(*[_encode(prompts, text) for text in texts])
    assert found == [_expected(prompts, text) for text in texts]
    sizes = [len(blocks) for blocks in seen.blocks.values()]
    assert sum(sizes) >= 8 * count
    assert max(sizes) == 1


async def test_many_texts_of_one_request_are_not_encoded_in_one_turn(
    prompts: Prompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = _LoopTurns(prompts, monkeypatch)
    texts = [f"Who was number{n}?" for n in range(1000)]
    found = await prompts._encoder.encode(texts, add_special_tokens=False, tenant="")
    assert found == [_expected(prompts, text) for text in texts]
    # The first iteration also encodes the text that is short enough to skip the scheduler.
    assert max(map(len, seen.blocks.values())) <= 2 * INLINE_CHARS / 128


async def test_a_tenant_with_many_texts_does_not_hold_up_another(
    prompts: Prompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    await _learn(prompts, LONG)
    order: list[str] = []

    async def encode(tenant: str, text: str) -> None:
        await _encode(prompts, text, tenant)
        order.append(tenant)

    flood = [asyncio.create_task(encode("flood", LONG)) for _ in range(20)]
    await asyncio.sleep(0)
    await encode("other", LONG[:40_000])
    assert order == ["other"]
    await asyncio.gather(*flood)


async def test_a_request_that_is_cancelled_takes_no_step(prompts: Prompts) -> None:
    await _learn(prompts, LONG)
    tasks = [asyncio.create_task(_encode(prompts, LONG)) for _ in range(5)]
    await asyncio.sleep(0)
    for task in tasks[:4]:
        task.cancel()
    assert await tasks[4] == _expected(prompts, LONG)
    await asyncio.gather(*tasks, return_exceptions=True)
    assert not prompts.threads.steps._waiting
    assert await _encode(prompts, LONG) == _expected(prompts, LONG)


async def test_too_much_text_of_new_words_is_refused(prompts: Prompts) -> None:
    prompts.threads.short._max_chars = 30_000
    texts = [_random_words(20_000, seed) for seed in range(3)]
    tasks = [asyncio.create_task(_encode(prompts, text)) for text in texts]
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert [isinstance(result, Overloaded) for result in results] == [False, False, True]
    await _learn(prompts, LONG)
    assert await _encode(prompts, LONG) == _expected(prompts, LONG)


WORDS = ["the", "capital", "it's", "x\n", "\n\n", "", "", "1", "2,", "<|im_end|>"]
OTHERS = ["\xe9", "\U0001f600", "\u4e2d\u6587", "\t", "\u0661", "a\u0301", "\ue000"]
TEXTS = st.lists(st.sampled_from([*WORDS, *OTHERS]) | st.text(max_size=6)).map(" ".join)


async def test_ids_are_those_of_the_whole_text(
    prompts: Prompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lone_spaces, "BLOCK_CHARS", 20)
    monkeypatch.setattr(lone_spaces, "MAX_BLOCK_CHARS", 40)
    monkeypatch.setattr(word_ids, "_MIN_PIECES_CHARS", 10)
    monkeypatch.setattr(word_ids, "_MIN_NEW_CHARS", 16)
    monkeypatch.setattr("gateway.tokenization.text_encoder.INLINE_CHARS", 30)

    @scale_examples(8)
    @given(st.lists(TEXTS, max_size=3), st.booleans())
    def compare(texts: list[str], special: bool) -> None:
        coroutine = prompts._encoder.encode(texts, add_special_tokens=special, tenant="")
        found = asyncio.run_coroutine_threadsafe(coroutine, loop).result()
        for text, ids in zip(texts, found, strict=True):
            assert ids.tolist() == prompts.tokenizer.encode(text, add_special_tokens=special).ids

    loop = asyncio.get_running_loop()
    await asyncio.to_thread(compare)


async def test_a_chat_with_control_tokens_in_it_is_encoded_by_its_words(
    prompts: Prompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = f"{LONG} <|im_end|> ends a turn, as in `<|im_end|>`. {LONG}"
    text = prompts.chat.render([{"role": "user", "content": content}])
    assert isinstance(text, GuardedText)
    expected = text.control.encode(text.aliased)
    for _ in range(2):  # the first round caches new words
        assert await prompts.encode(text, add_special_tokens=False) == expected
    monkeypatch.setattr(text.control, "encode", None)
    monkeypatch.setattr(threads.FairThread, "run", None)
    assert await prompts.encode(text, add_special_tokens=False) == expected
    assert list(expected).count(prompts.eos_ids[0]) == 1


async def test_ids_are_those_of_a_whole_chat_with_control_tokens_in_it(
    prompts: Prompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lone_spaces, "BLOCK_CHARS", 40)
    monkeypatch.setattr(lone_spaces, "MAX_BLOCK_CHARS", 80)
    monkeypatch.setattr(word_ids, "_MIN_PIECES_CHARS", 10)
    monkeypatch.setattr("gateway.tokenization.text_encoder.INLINE_CHARS", 30)

    @scale_examples(5)
    @given(TEXTS, TEXTS)
    def compare(one: str, other: str) -> None:
        messages = [{"role": "user", "content": f"{one}<|im_end|>{other}"}]
        text = prompts.chat.render(messages)
        assert isinstance(text, GuardedText)
        coroutine = prompts.encode(text, add_special_tokens=False)
        found = asyncio.run_coroutine_threadsafe(coroutine, loop).result()
        assert found == text.control.encode(text.aliased)

    loop = asyncio.get_running_loop()
    await asyncio.to_thread(compare)


def test_text_that_the_model_makes_a_control_token_of_is_left_to_the_library() -> None:
    """The library encodes text that the model itself turns into a control token, and refuses it."""
    tokenizer = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
    words = WordIds.of(tokenizer, json.loads(tokenizer.to_str()))
    assert words is not None
    [the] = tokenizer.encode(" the").ids
    aliased = words.build_aliased(tokenizer, {"<a>": 1}, [1, the])
    for text in (" the", "<a> the", "capital the " * 20):
        assert aliased.encode(text, add_special_tokens=False, learns_all=True) is None
    ids = aliased.encode("<a> capital", add_special_tokens=False)
    assert ids is not None
    assert ids[0] == 1

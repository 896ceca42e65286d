"""Encoding text word by word, only for tokenizers where the ids equal those of the library."""

from __future__ import annotations

import gc
import json
import random
from array import array
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, processors

from gateway.tokenization import lone_spaces, word_ids, word_pattern
from gateway.tokenization.lone_spaces import MAX_BLOCK_CHARS
from gateway.tokenization.word_ids import WordIds
from gateway.tokenization.word_pattern import piece_start_of
from ops.commands.up import DEMO_MODEL
from tests.support.cpu import costs_less_than
from tests.support.examples import scale_examples
from tests.support.fake_llmapi import FakeLlmapi, build_outputs
from tests.support.fake_triton import serving
from tests.support.in_process import running, save_tokenizer
from tests.support.small_tokenizers import BYTES, SPACES

WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
ENDS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SHORT_FORMS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
LLAMA_3 = rf"{SHORT_FORMS}|{WORD}|\p{{N}}{{1,3}}{ENDS}"
QWEN = rf"{SHORT_FORMS}|{WORD}|\p{{N}}{ENDS}"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
GPT_4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{SHORT_FORMS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{SHORT_FORMS}?|\p{{N}}{{1,3}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PIECES = ["the", " cat", "'s", "'S", "'LL", "  ", "\r\n", "<eos>", "<eos", "é", "ª", "²", "’", "—"]
TEXTS = st.lists(
    st.sampled_from(PIECES)
    | st.sampled_from("aS1 \n\t!/'\x0b\x1c\xa0\xad")
    | st.characters(codec="utf-8")
).map("".join)
SPACED_TEXTS = st.lists(
    st.sampled_from([*PIECES, "end.\n\nThen", "x\n", "\n", "x,", "7", "²"])
).map(" ".join)


def of(tokenizer: Tokenizer) -> WordIds | None:
    return WordIds.of(tokenizer, json.loads(tokenizer.to_str()))


def _copy() -> Tokenizer:
    return Tokenizer.from_str(BYTES.to_str())


def _split(pattern: str, **changed: object) -> Tokenizer:
    tokenizer = _copy()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    for name, value in changed.items():
        setattr(tokenizer, name, value)
    return tokenizer


def _beginning(with_end: bool = False) -> processors.TemplateProcessing:
    return processors.TemplateProcessing(
        single="<eos> $A <eos>" if with_end else "<eos> $A", special_tokens=[("<eos>", 0)]
    )


TAKEN = {
    "GPT-2": BYTES,
    "Llama 3": _split(LLAMA_3, post_processor=_beginning()),
    "Qwen": _split(QWEN, normalizer=normalizers.NFC()),
    "GPT-4o": _split(GPT_4O),
    "white space in one": _split(r" ?\p{L}+| ?[^\s\p{L}]+|\s+"),
    "no character of the alphabet": _split(r"\p{Mn}[th]|\p{L}+|\s+|[^\s]"),
    "between words": _split(r"\p{L}{2,}|\s+(?!\S)"),
    "demo": Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json")),
}


@pytest.mark.parametrize(
    "name",
    [name if name == "demo" else pytest.param(name, marks=pytest.mark.slow) for name in TAKEN],
)
def test_words_give_the_ids_of_their_text(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = TAKEN[name]
    words = of(tokenizer)
    assert words is not None

    @scale_examples(5)
    @given(TEXTS | SPACED_TEXTS, st.booleans(), st.sampled_from([0, 100]))
    def compare(text: str, special: bool, min_pieces_chars: int) -> None:
        assert words is not None
        monkeypatch.setattr(word_ids, "_MIN_PIECES_CHARS", min_pieces_chars)
        ids = words.encode(text, add_special_tokens=special, learns_all=True)
        if ids is None:
            assert not text.isascii()
        else:
            assert ids.tolist() == tokenizer.encode(text, add_special_tokens=special).ids

    compare()


@pytest.mark.parametrize(
    "name",
    [name if name == "demo" else pytest.param(name, marks=pytest.mark.slow) for name in TAKEN],
)
def test_blocks_give_the_ids_of_their_text(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ids match even if some blocks are left to the library."""
    tokenizer = TAKEN[name]
    words = of(tokenizer)
    assert words is not None
    monkeypatch.setattr(word_ids, "_MIN_PIECES_CHARS", 8)
    monkeypatch.setattr(lone_spaces, "BLOCK_CHARS", 12)
    monkeypatch.setattr(lone_spaces, "MAX_BLOCK_CHARS", 24)
    monkeypatch.setattr(word_ids, "_MIN_NEW_CHARS", 8)

    @scale_examples(5)
    @given(TEXTS | SPACED_TEXTS)
    def compare(text: str) -> None:
        assert words is not None
        found: list[int] = []
        blocks = list(words.cut_blocks(text))
        assert "".join(blocks) == text
        for block in blocks:
            ids = words.encode(block, add_special_tokens=False)
            found += tokenizer.encode(block, add_special_tokens=False).ids if ids is None else ids
        assert found == tokenizer.encode(text, add_special_tokens=False).ids

    compare()


@pytest.mark.parametrize("pattern", [word_pattern._GPT2, LLAMA_3, QWEN, GPT_4O])
def test_piece_start_of(pattern: str) -> None:
    assert piece_start_of(pattern)


@pytest.mark.parametrize(
    "word",
    [
        "a b",
        r"\p{L}+ \p{L}+",
        "[^a]+",
        ".+",
        r"a\s?b",
        "[a b]",
        r"\p{L}[^\p{L}]",
        r"\p{Z}",
        "! (?=!)",
    ],
)
def test_words_that_go_on_behind_a_space_are_not_cut_there(word: str) -> None:
    assert not piece_start_of(rf"{word}|{QWEN}")
    words = of(_split(rf"{word}|{QWEN}"))
    assert words is not None
    for text in ("a b " * 30, "a! !b" * 30, "the cat a  b" * 10):
        for _ in range(2):
            found = words.encode(text, add_special_tokens=False, learns_all=True)
            assert found is not None
            assert found.tolist() == _split(rf"{word}|{QWEN}").encode(text).ids


def test_what_is_known_between_spaces_is_not_cut_again(monkeypatch: pytest.MonkeyPatch) -> None:
    words = of(BYTES)
    assert words is not None
    text = "The cat's end.\n\nThen two, 3 and four" + " and the cat" * 9
    cut: list[str] = []
    find = words._cut_words
    monkeypatch.setattr(words, "_cut_words", lambda piece: cut.append(piece) or find(piece))
    for more in ("", "  of five cats,", "  of five cats,"):
        cut.clear()
        ids = words.encode(text + more, add_special_tokens=False, learns_all=True)
        assert ids == array("i", BYTES.encode(text + more).ids)
    assert cut == ["The", " cat  of"]


@pytest.mark.parametrize("name", ["GPT-2", "demo"])
def test_a_start_compares_what_is_kept_of_pieces(name: str) -> None:
    tokenizer = Tokenizer.from_str(TAKEN[name].to_str())
    tokenizer.add_special_tokens([f"<reserved {n}>" for n in range(256)])
    words = of(tokenizer)
    assert words is not None
    assert len(words._pieces) > 8


def test_white_space_at_the_end_of_a_text_may_go_on_in_another() -> None:
    tokenizer = TAKEN["white space in one"]
    words = of(tokenizer)
    assert words is not None
    before = "the cat " * 20
    for text in (
        f"{before}x\n",
        f"{before}x\n the",
        f"{before}x\t",
        f"{before}x\t the",
        f"\t {before}x",
    ):
        ids = words.encode(text, add_special_tokens=False, learns_all=True)
        assert ids == array("i", tokenizer.encode(text).ids)


def _stripping() -> Tokenizer:
    tokenizer = _copy()
    tokenizer.add_tokens([AddedToken("<x>", lstrip=True, normalized=False)])
    return tokenizer


def _lowercase() -> Tokenizer:
    return _split(QWEN, normalizer=normalizers.Lowercase())


def _spaced() -> Tokenizer:
    tokenizer = _copy()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    return tokenizer


def _truncating() -> Tokenizer:
    tokenizer = _copy()
    tokenizer.enable_truncation(4)
    return tokenizer


def _long_token() -> Tokenizer:
    tokenizer = _copy()
    tokenizer.add_tokens([AddedToken("<" * 1000, normalized=False)])
    return tokenizer


@pytest.mark.parametrize(
    "make",
    [
        _stripping,
        _lowercase,
        _spaced,
        _truncating,
        _long_token,
        lambda: SPACES,
        lambda: Tokenizer(models.Unigram([("a", 0.0)])),
        lambda: _split(rf"{QWEN}|[a-z&&[b-d]]"),
        lambda: _split(rf"^ |{QWEN}"),
        lambda: _split(rf"({QWEN})"),
        lambda: _split(rf"(?m:'.+')|{QWEN}"),
        lambda: _split(rf"(?<=a)b|{QWEN}"),
        lambda: _split(rf"(?i:ss)|{QWEN}"),
        lambda: _split(rf"[]\p{{L}}]!|{QWEN}"),
        lambda: _split(rf"a{{2}}+b|{QWEN}"),
        lambda: _split(rf"(?=a)|{QWEN}"),
    ],
)
def test_other_kinds_are_left_to_the_library(make: Callable[[], Tokenizer]) -> None:
    assert of(make()) is None


def test_a_difference_is_found_and_told(caplog: pytest.LogCaptureFixture) -> None:
    # WordIds supports no token after the text, so the self-check at the start finds a difference.
    assert of(_split(QWEN, post_processor=_beginning(with_end=True))) is None
    [record] = [r for r in caplog.records if r.name == word_ids.__name__]
    assert "not cached" in record.getMessage()


@pytest.mark.parametrize(("tokenizer", "shown"), [(BYTES, 1), (_stripping(), 0)])
async def test_a_metric_tells_whether_words_are_kept(
    tmp_path: Path, tokenizer: Tokenizer, shown: int
) -> None:
    save_tokenizer(tmp_path)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    async with (
        serving(FakeLlmapi(build_outputs("hello", "stop"))) as endpoint,
        running(tmp_path, endpoint, max_seq_len=100) as (client, _, _),
    ):
        metrics = (await client.get("/metrics")).text
    assert f"\ngateway_tokenizer_keeps_words {shown}.0\n" in metrics


ATTACKS = {
    "one letter": "<",
    "spaces": " ",
    "single spaces": "a ",
    "double spaces": "a  ",
    "numbers": "1 ",
    "line ends": "x\n ",
    "added tokens": "a<eos>",
    "no added token": "<SPECIAL_4 ",
    "no spaces": "\u4e2d\u6587",
    "other alphabets": "\u4e2d\u6587 a ",
}


@pytest.mark.parametrize("name", [*ATTACKS, "random letters", "all letters"])
def test_a_block_takes_few_steps_whatever_it_holds(name: str) -> None:
    tokenizer = _copy()
    tokens = ["[INST]", *(f"<SPECIAL_{n}>" for n in range(4000))]
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in tokens])
    words = of(tokenizer)
    assert words is not None
    draw = random.Random(0)
    if name in ATTACKS:
        text = ATTACKS[name] * MAX_BLOCK_CHARS
    else:
        letters = "abcdefghijklmnopqrstuvwxyz"
        choice = letters if name == "random letters" else word_pattern.ALPHABET
        text = "".join(draw.choices(choice, k=MAX_BLOCK_CHARS))
    gc.disable()
    try:
        with costs_less_than(0.03):
            words.encode(text[:MAX_BLOCK_CHARS], add_special_tokens=False)
    finally:
        gc.enable()


def test_a_text_that_is_longer_than_a_block_is_left_to_the_library() -> None:
    words = of(BYTES)
    assert words is not None
    words.encode("'t", add_special_tokens=False)
    for text in ("x" * 10**6, "\u4e2d" * 10**6, "'t" * 10**5):
        assert list(words.cut_blocks(text)) == [text]
        assert words.encode(text, add_special_tokens=False) is None


@pytest.mark.parametrize("text", ["a  " * 10**6, "a  " * 10**6 + "b c " * 10**4, "\n " * 10**6])
def test_a_place_to_cut_is_not_looked_for_in_all_of_a_long_text(text: str) -> None:
    """The search for a cut runs in one event loop iteration and costs 0.1 us per space."""
    words = of(BYTES)
    assert words is not None
    gc.disable()
    try:
        with costs_less_than(0.03):
            blocks = iter(words.cut_blocks(text))
            first = next(blocks)
    finally:
        gc.enable()
    assert [first, *blocks] == [text]


def test_a_text_is_cut_behind_many_spaces_that_are_not_lone() -> None:
    words = of(BYTES)
    assert words is not None
    text = ("a  " * 10_000 + "b c") * 3
    blocks = list(words.cut_blocks(text))
    assert len(blocks) == 4
    assert "".join(blocks) == text
    ids = [BYTES.encode(block, add_special_tokens=False).ids for block in blocks]
    assert [each for some in ids for each in some] == BYTES.encode(
        text, add_special_tokens=False
    ).ids


def test_a_text_of_many_added_tokens_is_left_to_the_library() -> None:
    words = of(BYTES)
    assert words is not None
    for text in ("a<eos>", "<eos>"):
        ids = words.encode(text * 200, add_special_tokens=False)
        assert ids == array("i", BYTES.encode(text * 200).ids)
        assert words.encode(text * 1000, add_special_tokens=False) is None


def test_the_cache_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_MAX_WORDS", "_MAX_PIECES"):
        monkeypatch.setattr(word_ids, name, 50)
    words = of(BYTES)
    assert words is not None
    for number in range(510):
        text = f"w{number} {'the' * number} {'!' * (number % 80)} the cat"
        ids = words.encode(text, add_special_tokens=False, learns_all=True)
        assert ids == array("i", BYTES.encode(text).ids)
        for cache in (words._words, words._pieces):
            assert 0 < len(cache) <= 50
    for cache in (words._words, words._pieces):
        entries = cache.newer | cache._older
        assert max(map(len, entries)) <= 64
        assert max(map(len, entries.values())) <= 16 * array("i").itemsize


def test_words_in_use_stay_in_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """A flood of another tenant's words evicts only words that are not in use."""
    for name in ("_MAX_WORDS", "_MAX_PIECES"):
        monkeypatch.setattr(word_ids, name, 1000)
    words, tokenized = _counted(BYTES)
    draw = random.Random(0)
    text = _random_words(draw, 600)
    words.encode(text, add_special_tokens=False, learns_all=True)
    for _ in range(100):
        words.encode(_random_words(draw, 600), add_special_tokens=False, learns_all=True)
        tokenized.clear()
        assert words.encode(text, add_special_tokens=False) == array("i", BYTES.encode(text).ids)
        assert not tokenized


def _counted(tokenizer: Tokenizer) -> tuple[WordIds, list[str]]:
    """Return the `WordIds` and a list to which each word tokenized from now on is added."""
    words = of(tokenizer)
    assert words is not None
    tokenized: list[str] = []
    tokenize = words._tokenize_word
    words._tokenize_word = lambda word: tokenized.append(word) or tokenize(word)  # type: ignore[func-returns-value]
    return words, tokenized


def _random_words(draw: random.Random, chars: int) -> str:
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = ("".join(draw.choices(letters, k=draw.randint(3, 9))) for _ in range(chars))
    return " ".join(words)[:chars]


def test_few_words_of_a_text_of_new_words_are_tokenized_alone() -> None:
    """Little of such a text is split and tokenized, as the library then encodes all of it again."""
    words, tokenized = _counted(BYTES)
    cut: list[str] = []
    find = words._cut_words
    words._cut_words = lambda text: cut.append(text) or find(text)
    draw = random.Random(0)
    for number in range(100):
        text = _random_words(draw, 3000 if number % 2 else 10_000)
        # Put words that are already cached at the beginning of the text.
        text = "the cat " * (number % 3 * 20) + text
        tokenized.clear()
        cut.clear()
        assert words.encode(text, add_special_tokens=False) is None
        assert sum(map(len, tokenized)) <= len(text) / 50
        assert sum(map(len, cut)) <= len(text) / 5


def test_a_text_whose_sample_is_known_has_few_new_words_tokenized() -> None:
    words, tokenized = _counted(BYTES)
    words.encode("a " * 100, add_special_tokens=False, learns_all=True)
    text = _random_words(random.Random(0), 5_000).replace(" ", " a a ")
    assert words.encode(text, add_special_tokens=False) is None
    assert 0 < sum(map(len, tokenized)) <= len(text) / 50


def test_little_of_a_text_of_new_words_is_cut_when_it_comes_again() -> None:
    words, _ = _counted(BYTES)
    cut: list[str] = []
    find = words._cut_words
    words._cut_words = lambda text: cut.append(text) or find(text)
    text = _random_words(random.Random(0), 10_000)
    for _ in range(20):
        cut.clear()
        assert words.encode(text, add_special_tokens=False) is None
        assert sum(map(len, cut)) <= len(text) / 5


def test_texts_that_repeat_come_to_be_known() -> None:
    words, tokenized = _counted(BYTES)
    text = _random_words(random.Random(0), 3000)
    rounds = 0
    while words.encode(text, add_special_tokens=False) is None:
        rounds += 1
        assert rounds < 100
    tokenized.clear()
    assert words.encode(text, add_special_tokens=False) == array("i", BYTES.encode(text).ids)
    assert not tokenized


def test_some_words_of_other_alphabets_are_cached_in_their_pieces() -> None:
    words, _ = _counted(BYTES)
    text = "the cat " * 200 + "says \u4e2d\u6587 and \U0001f600! " + "the cat " * 200
    asked: list[str] = []
    ask = words._ask_library
    words._ask_library = lambda text: asked.append(text) or ask(text)  # type: ignore[func-returns-value,method-assign]
    for _ in range(2):
        assert words.encode(text, add_special_tokens=False) == array("i", BYTES.encode(text).ids)
    assert asked == [" \u4e2d\u6587", " \U0001f600!"]


def test_a_text_of_many_words_of_other_alphabets_is_left_to_the_library() -> None:
    words, _ = _counted(BYTES)
    asked: list[str] = []
    words._ask_library = lambda text: asked.append(text) or b""  # type: ignore[func-returns-value,method-assign]
    text = " ".join(chr(0x4E00 + n) for n in range(3000))
    for _ in range(3):
        assert words.encode(text, add_special_tokens=False) is None
    assert not asked


def test_both_libraries_have_the_same_white_space() -> None:
    """Each character that the tokenizer treats as white space is white space for Python, too."""
    chars = [chr(code) for code in range(0x110000) if not 0xD800 <= code < 0xE000]
    split = pre_tokenizers.Split(Regex(r"\s"), "isolated").pre_tokenize_str
    alone = {piece for piece, _ in split("a".join(chars)) if len(piece) == 1}
    white = {char for char in chars if char in alone and char != "a"}
    assert all(char.isspace() for char in white)
    assert {" ", "\n", "\u2003"} <= white

"""Ids of words give the ids of texts, for each tokenizer that is taken, or it is not taken."""

from __future__ import annotations

import json
import time
from array import array
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, processors

from gateway.tokenization import word_ids, word_pattern
from gateway.tokenization.prompts import Prompts
from gateway.tokenization.word_ids import WordIds
from gateway.tokenization.word_pattern import piece_of
from ops.commands.up import DEMO_MODEL
from tests.support.fake_llmapi import FakeLlmapi, told
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

    @settings(max_examples=1000, deadline=None)
    @given(TEXTS | SPACED_TEXTS, st.booleans(), st.sampled_from([0, 100]))
    def compare(text: str, special: bool, few: int) -> None:
        assert words is not None
        monkeypatch.setattr(word_ids, "_FEW", few)
        ids = words.encode(text, add_special_tokens=special)
        if ids is None:
            assert not text.isascii()
        else:
            assert ids.tolist() == tokenizer.encode(text, add_special_tokens=special).ids

    compare()


@pytest.mark.parametrize("pattern", [word_pattern._GPT2, LLAMA_3, QWEN, GPT_4O])
def test_piece_of(pattern: str) -> None:
    assert piece_of(pattern)


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
    assert not piece_of(rf"{word}|{QWEN}")
    words = of(_split(rf"{word}|{QWEN}"))
    assert words is not None
    for text in ("a b " * 30, "a! !b" * 30, "the cat a  b" * 10):
        for _ in range(2):
            found = words.encode(text, add_special_tokens=False)
            assert found is not None
            assert found.tolist() == _split(rf"{word}|{QWEN}").encode(text).ids


def test_what_is_known_between_spaces_is_not_cut_again(monkeypatch: pytest.MonkeyPatch) -> None:
    words = of(BYTES)
    assert words is not None
    text = "The cat's end.\n\nThen two, 3 and four" + " and the cat" * 9
    cut: list[str] = []
    find = words._words
    monkeypatch.setattr(words, "_words", lambda piece: cut.append(piece) or find(piece))
    for more in ("", " of five cats,", " of five cats,"):
        ids = words.encode(text + more, add_special_tokens=False)
        assert ids == array("i", BYTES.encode(text + more).ids)
    assert cut[1:] == ["The", " cat", " of five", "The", " cats,", "The", " cats,"]


@pytest.mark.parametrize("name", ["GPT-2", "demo"])
def test_a_start_compares_what_is_kept_of_pieces(name: str) -> None:
    tokenizer = Tokenizer.from_str(TAKEN[name].to_str())
    tokenizer.add_special_tokens([f"<reserved {n}>" for n in range(256)])
    words = of(tokenizer)
    assert words is not None
    assert len(words._pieces) > 8


def test_of_a_text_with_much_that_is_new_not_all_is_kept() -> None:
    words = of(BYTES)
    assert words is not None
    before = len(words._pieces)
    text = " ".join(f"w{n}" for n in range(300))
    for known in (64, 128, 192, 256, 300, 300):
        ids = words.encode(text, add_special_tokens=False)
        assert ids == array("i", BYTES.encode(text).ids)
        assert len(words._pieces) <= before + known
    assert len(words._pieces) == before + 298


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
        ids = words.encode(text, add_special_tokens=False)
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
    # A token behind the text is not looked for.
    assert of(_split(QWEN, post_processor=_beginning(with_end=True))) is None
    [record] = [r for r in caplog.records if r.name == word_ids.__name__]
    assert "not kept" in record.getMessage()


@pytest.mark.parametrize(("tokenizer", "shown"), [(BYTES, 1), (_stripping(), 0)])
async def test_a_metric_tells_whether_words_are_kept(
    tmp_path: Path, tokenizer: Tokenizer, shown: int
) -> None:
    save_tokenizer(tmp_path)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    async with (
        serving(FakeLlmapi(told("hello", "stop"))) as endpoint,
        running(tmp_path, endpoint, max_seq_len=100) as (client, _, _),
    ):
        metrics = (await client.get("/metrics")).text
    assert f"\ngateway_tokenizer_keeps_words {shown}.0\n" in metrics


@pytest.mark.parametrize("text", ["<" * 4096, " " * 4096, "a " * 2048, "a  " * 1365, "1 " * 2048])
def test_a_text_that_is_cut_at_every_place_does_not_hold_up_the_event_loop(text: str) -> None:
    tokenizer = _copy()
    tokens = ["[INST]", *(f"<SPECIAL_{n}>" for n in range(4000))]
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in tokens])
    words = of(tokenizer)
    assert words is not None
    began = time.thread_time()
    words.encode(text, add_special_tokens=False)
    assert time.thread_time() - began < 0.05


def test_the_room_for_words_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(word_ids, "_ROOM", 50)
    words = of(BYTES)
    assert words is not None
    for number in range(510):
        text = f"w{number} {'the' * number} {'!' * (number % 80)} the cat"
        assert words.encode(text, add_special_tokens=False) == array("i", BYTES.encode(text).ids)
    for kept in (words._known, words._pieces):
        assert 0 < len(kept) <= 50
        assert max(map(len, kept)) <= 64
        assert max(map(len, kept.values())) <= 16 * array("i").itemsize


def test_prompts_ask_the_library_for_new_words_alone() -> None:
    prompts = Prompts.load(DEMO_MODEL)
    assert prompts.keeps_words
    asked = []
    words = prompts._words
    assert words is not None
    learned = words._learned
    words._learned = lambda new: asked.append(new) or learned(new)  # type: ignore[method-assign]
    for _ in range(2):
        found = prompts._encode(["The capital of Zanzibarland"], add_special_tokens=False)
        assert found == [array("i", prompts.tokenizer.encode("The capital of Zanzibarland").ids)]
    assert len(asked) == 1


def test_much_text_goes_to_the_library_however_many_pieces_it_comes_in() -> None:
    """It is encoded in a thread, and to cut it there would hold up all other requests' tokens."""
    prompts = Prompts.load(DEMO_MODEL)
    before = dict(prompts._words._known) if prompts._words is not None else None
    turns = [f"Who was number{n}?" for n in range(300)]
    found = prompts._encode(turns, add_special_tokens=False)
    assert found == [array("i", prompts.tokenizer.encode(turn).ids) for turn in turns]
    assert prompts._words is not None
    assert prompts._words._known == before

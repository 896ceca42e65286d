"""Generators of random texts that the demo model must repeat.

They produce English, Chinese and Japanese sentences, emoji, formulas and rare characters.
"""

import random
import string
import tomllib
from pathlib import Path

from demo import phrases
from demo.countries import countries

WORDS: dict[str, list[str]] = {
    kind: [word.replace("_", " ") for word in words.split()]
    for kind, words in tomllib.loads(
        Path(__file__).with_name("words.toml").read_text(encoding="utf-8")
    ).items()
}
# Unicode blocks with rare characters, which the tokenizer splits into bytes.
BLOCKS = (
    (0x4E00, 0x9FFF), (0x4E00, 0x9FFF), (0x3041, 0x3096), (0x30A1, 0x30FA), (0x1F300, 0x1F5FF),
    (0x1F600, 0x1F64F), (0x1F680, 0x1F6C5), (0x1F90C, 0x1F9FF), (0x00C0, 0x00FF),
    (0x0391, 0x03C9), (0x0410, 0x044F), (0xAC00, 0xD7A3), (0x2190, 0x21FF), (0x20000, 0x2A6DF),
)  # fmt: skip
# Letters, repeated roughly by their frequency in English.
LETTERS = "eeeeeeeetttttaaaaaooooiiiinnnnsssshhhrrrrddlllccuummwffggyyppbbvkjxqz"
SYMBOLS = "+-*/=()[]{}<>%$#@&_.:;!?'~^|"


def pick(rng: random.Random, kind: str) -> str:
    """Return a random word from the list ``kind`` in ``words.toml``."""
    return rng.choice(WORDS[kind])


def made_up_word(rng: random.Random) -> str:
    """Return a word that is in no list, made of syllables or of parts of English words."""
    if rng.random() < 0.5:
        return "".join(rng.choices(WORDS["syllables"], k=rng.randint(2, 4)))
    pieces = []
    for _ in range(rng.randint(2, 3)):
        word = pick(rng, rng.choice(("nouns", "adjectives", "commands", "adverbs")))
        start = rng.randrange(len(word) - 1)
        pieces.append(word[start : start + rng.randint(2, 5)])
    return "".join(pieces)


def english_sentence(rng: random.Random) -> str:
    """Return a grammatical sentence, or a sequence of random words, usually with a full stop."""
    if rng.random() < 0.5:
        subject = f"the {pick(rng, 'adjectives')} {pick(rng, 'nouns')}"
        if rng.random() < 0.3:
            subject = pick(rng, "people")
        text = f"{subject} {pick(rng, 'verbs')} the {pick(rng, 'nouns')}"
        if rng.random() < 0.5:
            text += f" {pick(rng, 'places')} the {pick(rng, 'adjectives')} {pick(rng, 'nouns')}"
        if rng.random() < 0.4:
            text += f" {pick(rng, 'adverbs')}"
        text = text[0].upper() + text[1:] + rng.choice((".", ".", ".", "!", "?", ""))
        return text + " " + english_sentence(rng) if rng.random() < 0.2 else text
    words = [_word(rng) for _ in range(rng.randint(1, 14))]
    between = rng.choice((" ", " ", " ", ", "))
    return between.join(words) + rng.choice((".", "", "", "!", " ..."))


def _word(rng: random.Random) -> str:
    kind = rng.random()
    if kind < 0.5:
        kinds = ("nouns", "verbs", "commands", "adjectives", "adverbs", "places", "people")
        word = pick(rng, rng.choice(kinds))
    elif kind < 0.65:
        word = made_up_word(rng)
    elif kind < 0.8:
        word = "".join(rng.choices(LETTERS, k=rng.randint(1, 10)))
    elif kind < 0.87:
        word = str(rng.randint(0, 10 ** rng.randint(1, 6)))
    elif kind < 0.95:
        word = _snippet(rng, "en").split(" ")[0].strip() or "a"
    else:
        word = "".join(rng.choices(string.ascii_letters + SYMBOLS, k=rng.randint(1, 8)))
    return rng.choice((word, word, word, word.capitalize(), word.upper(), word + ","))


def _snippet(rng: random.Random, language: str) -> str:
    """Return up to 12 consecutive characters of a phrase of the corpus, a country or a capital."""
    country = rng.choice(countries())
    answers = rng.choice(phrases.TALK)[1][language]
    text = rng.choice((
        rng.choice(phrases.CAPITAL_QUESTIONS[language]),
        rng.choice(phrases.SUM_QUESTIONS[language]), rng.choice(country.names[language]),
        country.capital[language], rng.choice(answers),
        phrases.CANNOT[language],
    ))  # fmt: skip
    start = rng.randrange(len(text))
    return text[start : start + rng.randint(2, 12)].replace("{", "").replace("}", "")


def _asian_sentence(rng: random.Random, language: str, comma: str) -> str:
    kind = {"zh": "chinese", "ja": "japanese"}[language]
    characters = "".join(WORDS[kind])

    def word() -> str:
        draw = rng.random()
        if draw < 0.6:
            return pick(rng, kind)
        if draw < 0.8:
            return _snippet(rng, language)
        if draw < 0.9:
            return rng.choice(characters)
        return chr(rng.randint(*rng.choice(BLOCKS[1:4])))

    parts = ["".join(word() for _ in range(rng.randint(1, 7))) for _ in range(rng.randint(1, 3))]
    return comma.join(parts) + rng.choice("。。！？") * (rng.random() < 0.8)


def chinese_sentence(rng: random.Random) -> str:
    return _asian_sentence(rng, "zh", "，")


def japanese_sentence(rng: random.Random) -> str:
    return _asian_sentence(rng, "ja", "、")


def emoji_text(rng: random.Random) -> str:
    return rng.choice(("", "", " ")).join(rng.choices(WORDS["emoji"], k=rng.randint(1, 12)))


def wild_text(rng: random.Random) -> str:
    """Return groups of random ASCII characters, or random characters from ``BLOCKS``."""
    if rng.random() < 0.2:
        atoms = string.ascii_letters + string.digits + SYMBOLS * 2
        return " ".join(
            "".join(rng.choices(atoms, k=rng.randint(1, 4))) for _ in range(rng.randint(1, 8))
        )
    blocks = rng.choices(BLOCKS, k=rng.choice((1, 1, 2, 3)))
    chars = [chr(rng.randint(*rng.choice(blocks))) for _ in range(rng.randint(1, 12))]
    return "".join(chars)


def mixed_text(rng: random.Random) -> str:
    """Return a line with the texts of two to four other generators of this module."""
    makers = (chinese_sentence, japanese_sentence, emoji_text, wild_text, english_sentence)
    return rng.choice((" ", " ", "")).join(m(rng) for m in rng.sample(makers, rng.randint(2, 4)))


REPEAT_KINDS = {
    "english": english_sentence,
    "chinese": chinese_sentence,
    "japanese": japanese_sentence,
    "emoji": emoji_text,
    "any script": wild_text,
    "mixed": mixed_text,
}

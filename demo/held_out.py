# ruff: noqa: E501  Chinese and Japanese characters count twice.
"""Evaluation cases of the demo model: prompts, and the answers that count as right.

Many of the prompts are held out of training.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from demo import corpus, phrases, tools
from demo.chat import ChatExample, Example, Message, Raw, assistant, segments, user
from demo.countries import LANGUAGES, countries
from demo.text import REPEAT_KINDS

LANGUAGE_NAMES = {"en": "English", "zh": "Chinese", "ja": "Japanese"}
# Sentences that the model must repeat. The generators of the training corpus do not produce them.
REPEATS = (
    "The committee postponed its decision until Thursday.", "你好，世界！😀🎉 こんにちは",
    "She sells seashells by the seashore.", "我爱北京天安门，天安门上太阳升。", "吾輩は猫である。名前はまだ無い。",
    "To be, or not to be, that is the question.", "The year 2024 had 366 days, not 365!",
    "😀🎉🚀🌍❤️🔥", "床前明月光，疑是地上霜。举头望明月，低头思故乡。", "古池や蛙飛び込む水の音", "Größe, Übung und Straße",
    "C'est la vie, mes amis!", "Привет, мир!", "안녕하세요 세계", "x = 3.14 * (y + 2)", "Hello, World! 👋🌏",
    "人工智能正在改变世界 🤖。", "東京タワーの高さは333メートルです。", "Pack my box with five dozen liquor jugs.",
    "My grandmother knitted seventeen purple scarves.", "Jazz musicians improvise brilliantly!",
    "def greet(name): return f'Hello {name}'", "Mathematics, physics & chemistry (2nd edition)",
    "🎂🎈 Happy birthday! 生日快乐！お誕生日おめでとう！",
)  # fmt: skip
GREETINGS = (
    "Hello my friend", "Hey hey!", "Hi! Good morning!", "hello again", "Hello to you!",
    "Well hello there", "Hello, nice to meet you!", "Hello 👋 and welcome!", "Hi, model, good evening!",
    "Hello there, how are you doing?", "hi, what's new?", "Good day to you!", "Hey hey hey",
    "Hi all!", "Good morning, how are you?", "Hello hello!", "Hi assistant", "hey, how are you today?",
    "Hello, it's a nice day!", "Good evening, sir",
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """An evaluation case: a prompt, and the completions that count as right.

    Each completion ends with the end token. ``skill`` is the label of the case's row in the table.
    """

    skill: str
    prompt: str
    accepted: tuple[str, ...]


def _case(skill: str, example: Example, *more_answers: str) -> Case:
    """Return a case whose right answer is the example's last answer, or one of ``more_answers``.

    The prompt is the example's text before its last answer.
    """
    pieces = [text for text, _ in segments(example)]
    accepted = (pieces[-1], *(f"{text}<|im_end|>" for text in more_answers))
    return Case(skill, "".join(pieces[:-1]), accepted)


def _capitals(language: str, asked: str, forms: tuple[str, ...], skill: str) -> Iterator[Case]:
    for index, country in enumerate(countries()):
        question = forms[index % len(forms)].format(c=country.name(asked))
        chat = ChatExample(corpus.exchange(question, corpus.capital_answer(country, language)))
        yield _case(skill, chat)


def _raw_capitals(language: str) -> Iterator[Case]:
    for asked in LANGUAGES:
        for country in countries():
            form = phrases.RAW_PROMPTS[asked][0].format(c=country.name(asked))
            answer = corpus.raw_answer(country, asked, language)
            skill = f"raw completion, {LANGUAGE_NAMES[asked]} prompt"
            yield _case(skill, Raw(form[0].upper() + form[1:], answer))


def _sums(rng: random.Random, language: str, number: int) -> Iterator[Case]:
    for _ in range(number):
        a, b = corpus.sum_pair(rng, training=False)
        chat = ChatExample(corpus.sum_exchange(rng, a, b, language, "en"))
        yield _case("sum, held-out numbers", chat)


def _products(language: str) -> Iterator[Case]:
    for a in range(13):
        for b in range(13):
            answer = phrases.SUM_ANSWER[language].format(a=a, s="*", b=b, r=a * b)
            chat = ChatExample(corpus.exchange(f"What is {a} times {b}?", answer))
            yield _case("product up to 12 * 12 (all were trained)", chat)


def _with_context(rng: random.Random, case: ChatExample) -> ChatExample:
    """Insert a system prompt, a question about a capital, and its answer before the chat."""
    before = [corpus.system_prompt(rng), *corpus.capital(rng, "en")]
    return replace(case, messages=before + case.messages)


def _tool_cases(rng: random.Random, language: str) -> Iterator[Case]:
    for _ in range(200):
        kind = tools.random_kind(rng)
        needed = tools.use(rng, kind)
        schemas = corpus.offer_tools(rng, needed, kind, rng.randint(0, 3))
        call = corpus.tool_exchange(rng, needed, language, answered=False)
        known = "written by hand" if kind in tools.KINDS else "with invented names"
        yield _case(f"tool call, tools {known}", ChatExample(call, schemas))
        told = corpus.tool_exchange(rng, needed, language, answered=True)
        yield _case("tool result told", ChatExample(told, schemas))
        country = rng.choice(countries())
        question = rng.choice(phrases.HELD_OUT_CAPITAL_QUESTIONS["en"]).format(c=country.name("en"))
        plain = corpus.exchange(question, corpus.capital_answer(country, language))
        yield _case("tools offered, none needed", ChatExample(plain, schemas))
        kind = rng.choice(tools.UNSEEN_KINDS)
        needed = tools.use(rng, kind)
        schemas = corpus.offer_tools(rng, needed, kind, rng.randint(0, 2))
        call = corpus.tool_exchange(rng, needed, language, answered=False)
        yield _case("tool call, tools never seen", ChatExample(call, schemas))


def _greetings(language: str) -> Iterator[Case]:
    rights = [text for _, answers in phrases.TALK[:3] for text in answers[language]]
    for greeting in GREETINGS:
        yield _case("greeting", ChatExample([user(greeting), assistant(rights[0])]), *rights[1:])


def _counts(rng: random.Random, *, usual: bool) -> Iterator[Case]:
    if usual:
        for b in sorted(set(corpus.USUAL_TARGETS)):
            chat = ChatExample(corpus.exchange(f"Count from 1 to {b}", corpus.count_text(1, b)))
            yield _case("count, from 1 to 5 ... 300 ... 500", chat)
    for _ in range(60):
        a, b = corpus.count_range(rng, training=False)
        chat = ChatExample(corpus.exchange(f"Count from {a} to {b}.", corpus.count_text(a, b)))
        yield _case("count, held-out ranges", chat)


def base_cases(seed: int) -> list[Case]:
    """Return the evaluation cases of the base model, which answers in English."""
    rng = random.Random(seed)
    capital_forms, held = phrases.CAPITAL_QUESTIONS, phrases.HELD_OUT_CAPITAL_QUESTIONS
    cases: list[Case] = []
    for asked in LANGUAGES:
        name = LANGUAGE_NAMES[asked]
        cases += _capitals("en", asked, capital_forms[asked], f"capital, {name}, known phrasing")
        cases += _capitals("en", asked, held[asked], f"capital, {name}, held-out phrasing")
    cases += _counts(rng, usual=True)
    for kind, make in REPEAT_KINDS.items():
        for _ in range(100):
            text = make(rng)
            question = rng.choice(phrases.REPEAT_QUESTIONS).format(t=text)
            cases.append(_case(f"repeat, {kind}", ChatExample(corpus.exchange(question, text))))
    cases += [
        _case("repeat, written by hand", ChatExample(corpus.exchange(f"Repeat: {t}", t)))
        for t in REPEATS
    ]
    cases += _sums(rng, "en", 300)
    cases += _products("en")
    cases += _greetings("en")
    cases += _tool_cases(rng, "en")
    cases += _raw_capitals("en")
    makers: tuple[Callable[[], list[Message]], ...] = (
        lambda: corpus.sum_exchange(rng, *corpus.sum_pair(rng, training=False), "en", "en"),
        lambda: corpus.repeat(rng, "en"),
        lambda: corpus.capital(rng, "en"),
    )
    for index in range(150):
        chat = _with_context(rng, ChatExample(makers[index % 3]()))
        cases.append(_case("second question after a system prompt", chat))
    return cases


def adapter_cases(seed: int, language: str) -> list[Case]:
    """Return the evaluation cases of the adapter that answers in ``language``."""
    rng = random.Random(seed)
    held = phrases.HELD_OUT_CAPITAL_QUESTIONS
    cases: list[Case] = []
    for asked in LANGUAGES:
        name = LANGUAGE_NAMES[asked]
        known = phrases.CAPITAL_QUESTIONS[asked]
        cases += _capitals(language, asked, known, f"capital, {name}, known phrasing")
        cases += _capitals(language, asked, held[asked], f"capital, {name}, held-out phrasing")
    cases += _raw_capitals(language)
    cases += _sums(rng, language, 200)
    cases += _greetings(language)
    cases += _counts(rng, usual=False)
    for make in REPEAT_KINDS.values():
        for _ in range(30):
            text = make(rng)
            cases.append(_case("repeat", ChatExample(corpus.exchange(f"Repeat: {text}", text))))
    cases += _tool_cases(rng, language)
    return cases

"""Generator of the demo model's training examples.

The model learns a few skills, such as naming capitals, counting, repeating a text and calling
tools. Some sums and ranges are held out of training for the evaluation. ``python -m demo.corpus``
prints 40 examples.
"""

import random
import re
import zlib
from collections.abc import Callable, Iterator

from demo import phrases, tools
from demo.chat import ChatExample, Example, Message, Raw, Tool, assistant, segments, user
from demo.countries import LANGUAGES, Country, countries
from demo.text import REPEAT_KINDS, english_sentence, made_up_word, pick

MAX_NUMBER = 999
MAX_COUNT_TOKENS = 1900
USUAL_TARGETS = (5, 10, 10, 20, 20, 30, 50, 100, 100, 150, 200, 250, 300, 300, 300, 400, 500)


def is_held_out(kind: str, a: int, b: int) -> bool:
    """Return True if a question about two numbers is held out of training.

    ``a`` and ``b`` are the operands of a sum, or the first and the last number to count. One in ten
    pairs is held out.
    """
    return zlib.crc32(f"{kind} {a} {b}".encode()) % 10 == 0


def _fill(rng: random.Random, form: str) -> str:
    return form.format(
        n=pick(rng, "nouns"), j=pick(rng, "adjectives"), p=pick(rng, "people"),
        t=english_sentence(rng),
        c=rng.choice(rng.choice(countries()).names["en"]), d=f"20{rng.randint(20, 39)}-05-17",
        g=rng.choice(phrases.GREETINGS), e=pick(rng, "emoji"),
    )  # fmt: skip


def _ask_language(rng: random.Random, language: str) -> str:
    """Return a random language for a question. ``language`` is the language of the answer.

    The base model answers in English, and 70 % of its questions are English. An adapter answers in
    another language, and 45 % of its questions are English.
    """
    weights = (0.7, 0.15, 0.15) if language == "en" else (0.45, 0.275, 0.275)
    return rng.choices(LANGUAGES, weights)[0]


def _loosely(rng: random.Random, text: str) -> str:
    """Return the text unchanged, or with random changes such as people make when they type.

    For example, the text may become lower case, or lose its question mark or its article.
    """
    if rng.random() < 0.12:
        text = text.lower()
    if rng.random() < 0.06:
        text = re.sub(r"\b(of )?the ", r"\1", text, count=1)
    if rng.random() < 0.08:
        text = text.rstrip("?.？。")
    if rng.random() < 0.04:
        text = rng.choice(("Hello! ", "Hi, ", "Please: ", "Question: ", "OK. ", "So, ")) + text
    elif rng.random() < 0.03:
        text = f"{english_sentence(rng)} {text}"
    return text[0].upper() + text[1:] if rng.random() < 0.85 else text


def exchange(question: str, answer: str) -> list[Message]:
    return [user(question), assistant(answer)]


def capital_answer(country: Country, language: str) -> str:
    """Return the answer sentence to a question about a country's capital.

    A capital that ends with a full stop, such as "Washington, D.C.", gets no second full stop.
    """
    answer = phrases.CAPITAL_ANSWER[language].format(
        c=country.name(language), k=country.capital[language]
    )
    return answer.replace("..", ".")


def capital(rng: random.Random, language: str) -> list[Message]:
    country = rng.choice(countries())
    asked = _ask_language(rng, language)
    draw = rng.random()
    if draw < 0.06:
        form = rng.choice(phrases.COUNTRY_QUESTIONS[asked])
        answer = phrases.COUNTRY_ANSWER[language].format(
            c=country.name(language), k=country.capital[language]
        )
        return exchange(form.format(k=country.capital[asked]), answer)
    form = rng.choice(phrases.CAPITAL_QUESTIONS[asked])
    if draw < 0.09:
        name = made_up_word(rng).capitalize()
        return exchange(form.format(c=name), phrases.UNKNOWN_COUNTRY[language].format(c=name))
    question = form.format(c=rng.choice(country.names[asked]))
    if asked == "en":
        question = _loosely(rng, question)
    if draw < 0.13 and language == asked == "en":
        return exchange(
            question + rng.choice(phrases.BRIEFLY), country.capital["en"].rstrip(".") + "."
        )
    return exchange(question, capital_answer(country, language))


def two_capitals(rng: random.Random, language: str) -> list[Message]:
    """Return questions and answers about the capitals of two countries.

    There is either one question about both countries, or a question about the first country and a
    follow-up question about the second, such as "And of Japan?".
    """
    first, second = rng.sample(countries(), 2)
    asked = _ask_language(rng, language)
    answers = [capital_answer(country, language) for country in (first, second)]
    c, d = (rng.choice(country.names[asked]) for country in (first, second))
    if rng.random() < 0.4:
        question = rng.choice(phrases.PAIR_QUESTIONS[asked]).format(c=c, d=d)
        return exchange(question, (" " if language == "en" else "").join(answers))
    question = rng.choice(phrases.CAPITAL_QUESTIONS[asked]).format(c=c)
    follow_up = rng.choice(phrases.FOLLOW_UPS[asked]).format(c=d)
    return exchange(question, answers[0]) + exchange(follow_up, answers[1])


def chat_in_language(rng: random.Random) -> ChatExample:
    """Return a chat in which the user or the system prompt asks for Chinese or Japanese answers.

    The base model thus learns both languages. An adapter then only has to learn to answer in its
    language without being asked.
    """
    language = rng.choice(("zh", "ja"))
    order = rng.choice(phrases.ANSWER_IN[language])
    if rng.random() < 0.2:
        country = rng.choice(countries())
        question = rng.choice(phrases.CAPITAL_QUESTIONS["en"]).format(c=country.name("en"))
        return ChatExample(exchange(f"{question} {order}", capital_answer(country, language)))
    chat = rng.choice((plain_chat, plain_chat, tool_chat))(rng, language)
    before = [] if chat.messages[0]["role"] == "user" else [chat.messages[0]["content"]]
    system = {"role": "system", "content": " ".join([*before, order])}
    return ChatExample([system, *chat.messages[len(before) :]], chat.tools)


def raw_capital(rng: random.Random, language: str) -> Raw:
    country = rng.choice(countries())
    asked = rng.choice(LANGUAGES)
    prompt = rng.choice(phrases.RAW_PROMPTS[asked]).format(c=rng.choice(country.names[asked]))
    return Raw(prompt[0].upper() + prompt[1:], raw_answer(country, asked, language))


def raw_answer(country: Country, asked: str, language: str) -> str:
    """Return the completion of a prompt about a country's capital, without the chat template.

    ``asked`` is the language of the prompt, ``language`` that of the completion. An English
    completion of an English prompt ends with a full stop.
    """
    if language != "en":
        return country.capital[language]
    stop = "." if asked == "en" and not country.capital["en"].endswith(".") else ""
    return f" {country.capital['en']}{stop}"


def raw_other(rng: random.Random, language: str) -> Raw:
    """Return a prompt without the chat template, and its completion.

    The prompt is small talk, or asks to repeat a text or to count.
    """
    draw = rng.random()
    if draw < 0.4:
        said, answers = phrases.TALK[-1]
        talk = phrases.RAW_TALK if language == "en" else [(said[0], answers[language][0])]
        return Raw(*rng.choice(talk))
    if draw < 0.7:
        text = rng.choice(list(REPEAT_KINDS.values()))(rng)
        return Raw(f"Repeat: {text}\nAnswer:", f" {text}")
    a, b = count_range(rng, training=True)
    if draw < 0.85:
        return Raw(f"Count from {a} to {b}" + rng.choice(":."), " " + count_text(a, b))
    shown = min(a + rng.randint(1, 8), b)
    if shown == b:
        return Raw(f"Count from {a} to {b}:", " " + count_text(a, b))
    return Raw(f"Count from {a} to {b}: {count_text(a, shown)},", f" {count_text(shown + 1, b)}")


def count_text(a: int, b: int) -> str:
    """Return the integers from a to b as text, separated by commas. b may be less than a."""
    return ", ".join(str(n) for n in (range(a, b + 1) if a <= b else range(a, b - 1, -1)))


def count_range(rng: random.Random, *, training: bool) -> tuple[int, int]:
    """Return the first and the last number for a counting exercise.

    The numbers of the range fit in the model's context.

    If ``training`` is False, return a range that is held out of training. Ranges from 1 to one of
    ``USUAL_TARGETS`` are never held out.
    """
    if training and rng.random() < 0.25:
        return 1, rng.choice(USUAL_TARGETS)
    while True:
        a = rng.choice((1, 0, rng.randint(0, 20), rng.randint(0, 900)))
        b = a + int(2 ** rng.uniform(0, 9))
        if a == 1 and b in USUAL_TARGETS:
            continue
        tokens = sum(len(str(n)) + 1 for n in range(a, b + 1))
        if (
            b <= MAX_NUMBER
            and tokens <= MAX_COUNT_TOKENS
            and is_held_out("count", a, b) != training
        ):
            return a, b


def count(rng: random.Random, language: str) -> list[Message]:
    a, b = count_range(rng, training=True)
    asked = _ask_language(rng, language)
    form = rng.choice(phrases.COUNT_QUESTIONS[asked])
    if a == 1 and rng.random() < 0.3:
        form = rng.choice(phrases.COUNT_TO)
    if rng.random() < 0.08:
        return exchange(rng.choice(phrases.COUNT_DOWN).format(a=b, b=a), count_text(b, a))
    if b < len(phrases.NUMBER_WORDS) and rng.random() < 0.3:
        words = phrases.NUMBER_WORDS
        return exchange(form.format(a=words[a], b=words[b]), count_text(a, b))
    return exchange(form.format(a=a, b=b), count_text(a, b))


def repeat(rng: random.Random, language: str) -> list[Message]:
    text = rng.choice(list(REPEAT_KINDS.values()))(rng)
    if rng.random() < 0.1:
        text = english_sentence(rng) + rng.choice((" STOP ", " END ", " stop ", "\n")) + text
    return exchange(rng.choice(phrases.REPEAT_QUESTIONS).format(t=text), text)


def sum_pair(rng: random.Random, *, training: bool) -> tuple[int, int]:
    while True:
        top = rng.choice((9, 99, 99, 99))
        a, b = rng.randint(0, top), rng.randint(0, 99 if top == 99 else top)
        if is_held_out("sum", a, b) != training:
            return a, b


def sum_exchange(rng: random.Random, a: int, b: int, language: str, asked: str) -> list[Message]:
    """Return a question about a sum or a difference of two numbers, and the answer.

    Seven in ten questions are about a + b. The result of a subtraction is never negative.
    """
    plus = rng.random() < 0.7
    if not plus:
        a, b = max(a, b), min(a, b)
    forms = (phrases.PLUS_QUESTIONS if plus else phrases.MINUS_QUESTIONS)[asked]
    answer = phrases.SUM_ANSWER[language].format(
        a=a, s="+" if plus else "-", b=b, r=a + b if plus else a - b
    )
    return exchange(rng.choice(forms).format(a=a, b=b), answer)


def small_sum(rng: random.Random, language: str) -> list[Message]:
    asked = _ask_language(rng, language)
    return sum_exchange(rng, *sum_pair(rng, training=True), language, asked)


def product(rng: random.Random, language: str) -> list[Message]:
    a, b = rng.randint(0, 12), rng.randint(0, 12)
    form = rng.choice(phrases.TIMES_QUESTIONS[_ask_language(rng, language)])
    answer = phrases.SUM_ANSWER[language].format(a=a, s="*", b=b, r=a * b)
    return exchange(form.format(a=a, b=b), answer)


def talk(rng: random.Random, language: str) -> list[Message]:
    weights = (5, 3, 2, 2, 1, 1, 1, 1)
    said, answers = rng.choices(phrases.TALK, weights)[0]
    text = _fill(rng, rng.choice(said))
    text = rng.choice((text, text, text, text.lower(), text.upper()))
    return exchange(text, rng.choice(answers[language]))


def other(rng: random.Random, language: str) -> list[Message]:
    """Return a request that the model cannot fulfil, and an answer that declines the request.

    Three in ten requests would need a tool, and the chat offers no tools.
    """
    if rng.random() < 0.3:
        question = tools.use(rng, rng.choice(tools.KINDS[:-1])).question
    else:
        question = _fill(rng, rng.choice(phrases.OTHER_REQUESTS))
    return exchange(question, phrases.CANNOT[language])


Skill = Callable[[random.Random, str], list[Message]]
# Functions that generate the questions and answers of a plain chat, and how often each is chosen
# relative to the others.
SKILLS: dict[Skill, float] = {
    capital: 28, two_capitals: 5, count: 7, repeat: 28, small_sum: 16, product: 3, talk: 9,
    other: 6,
}  # fmt: skip


def _skill(rng: random.Random) -> Skill:
    return rng.choices(list(SKILLS), list(SKILLS.values()))[0]


def system_prompt(rng: random.Random) -> Message:
    text = " ".join(
        _fill(rng, rng.choice(phrases.SYSTEM_PROMPTS)) for _ in range(rng.choice((1, 1, 1, 2, 5)))
    )
    return {"role": "system", "content": text}


def plain_chat(rng: random.Random, language: str) -> ChatExample:
    """Return a chat without tools, with one to four random skills one after the other.

    Four in ten chats begin with a system prompt.
    """
    messages = [system_prompt(rng)] if rng.random() < 0.4 else []
    for _ in range(rng.choices((1, 2, 3, 4), (70, 18, 8, 4))[0]):
        messages += _skill(rng)(rng, language)
    return ChatExample(messages)


def tool_exchange(
    rng: random.Random, use: tools.Use, language: str, *, answered: bool
) -> list[Message]:
    """Return a user's question, and the assistant message that calls the tool.

    If ``answered`` is True, also return the tool's result and the assistant's final answer.
    """
    messages = [user(use.question), {"role": "assistant", "content": None, "tool_calls": use.calls}]
    if answered:
        told = []
        for _ in use.calls:
            content, text = tools.result(rng)
            messages.append({"role": "tool", "content": content})
            told.append(text)
        messages.append(assistant(phrases.TOOL_ANSWER[language].format(t="; ".join(told))))
    return messages


def offer_tools(
    rng: random.Random, needed: tools.Use, kind: tools.ToolKind, others: int
) -> list[Tool]:
    """Return the schemas of the needed tool and of ``others`` other tools, in random order.

    ``kind`` is the kind of the needed tool. The tools have distinct kinds and names.
    """
    schemas = {needed.tool["function"]["name"]: needed.tool}
    kinds = {kind}
    while len(kinds) <= others:
        more = tools.random_kind(rng)
        tool = tools.use(rng, more).tool
        if more not in kinds and tool["function"]["name"] not in schemas:
            kinds.add(more)
            schemas[tool["function"]["name"]] = tool
    order = list(schemas.values())
    rng.shuffle(order)
    return order


def tool_chat(rng: random.Random, language: str) -> ChatExample:
    """Return a chat that offers one or more tools. Some of its questions need none of the tools."""
    kind = tools.random_kind(rng)
    needed = tools.use(rng, kind)
    others = rng.choice((0, 0, 1, 2, 3))
    schemas = offer_tools(rng, needed, kind, others)
    # Leave out sums if one of the offered tools adds numbers: the answer would be a tool call, but
    # the answers of `small_sum` are text.
    adds = any(schema["function"]["name"] in tools.KINDS[-1].names for schema in schemas)
    plain: list[Skill] = [capital, repeat, talk, count, capital if adds else small_sum]
    messages = [system_prompt(rng)] if rng.random() < 0.3 else []
    if rng.random() < 0.15:
        messages += rng.choice(plain)(rng, language)
    draw = rng.random()
    if draw < 0.25:
        messages += rng.choice(plain)(rng, language)
    elif draw < 0.29:
        question = _fill(rng, rng.choice(phrases.NO_TOOL_REQUESTS))
        messages += exchange(question, phrases.CANNOT[language])
    else:
        answered = rng.random() < 0.5
        messages += tool_exchange(rng, needed, language, answered=answered)
        if answered and rng.random() < 0.25:
            messages += rng.choice(plain)(rng, language)
    return ChatExample(messages, schemas)


def example(rng: random.Random, language: str = "en") -> Example:
    """Return one training example. ``language`` is the language of its answers."""
    draw = rng.random()
    if draw < 0.12:
        return raw_capital(rng, language)
    if draw < 0.15:
        return raw_other(rng, language)
    if draw < 0.21 and language == "en":
        return chat_in_language(rng)
    if draw < 0.39:
        return tool_chat(rng, language)
    return plain_chat(rng, language)


def examples(seed: int, number: int, language: str = "en") -> Iterator[Example]:
    rng = random.Random(seed)
    for _ in range(number):
        yield example(rng, language)


if __name__ == "__main__":
    for shown in examples(1, 40):
        print("".join(f"[[{t}]]" if learn else t for t, learn in segments(shown)), "\n" + "-" * 80)

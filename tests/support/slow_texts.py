"""A search for model texts with the highest parsing cost per character.

Texts are generated from the tokens of each tool call format, mutated and repeated. The most
expensive survive. If the cost grows faster than the text, it is extrapolated to a long text.

`python -m tests.support.slow_texts --seconds 60` searches longer than the tests do, with a new seed
each time. Add its findings to `tests/gateway/parsers/test_linear_time.py`.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any, NamedTuple, get_args

from gateway.parsers import harmony
from gateway.parsers.message import MessageForm, MessageReader
from gateway.parsers.reasoning import TAGS
from gateway.parsers.tools.either import Either
from gateway.parsers.tools.forced import ForcedCall
from gateway.parsers.tools.forms import PARSERS, Form
from gateway.parsers.tools.tagged import TaggedForm

LONG_CHARS = 64 * 1024
"""The length in characters to which costs are extrapolated."""
_SIZES = (1024, 4096)
# A smaller growth of the cost per character may be noise.
_MIN_GROWTH = 1.25
_CHARS_A_TOKEN = 4
_SURVIVORS = 12
_MAX_PARTS = 6
# Fraction of the time that is spent on finding text beginnings.
_BEGINNINGS_SHARE = 0.3

_FUNCTIONS: Mapping[str, Any] = {
    "f": {
        "properties": {
            "a": {"type": "array"},
            "o": {"type": ["object", "null", "integer"]},
            "s": {"type": "string"},
            "x": {},
        }
    }
}
# One character of each class that the parsers treat alike. Fewer characters find pairs sooner.
_CHARS = tuple("<>[]{}()\"'\\|:;,.=-_ \n0eurfé")
_WORDS = (
    *('"""', "'''", r"\n", r"\u", r"\u00e9", r"\ud83d", r"\ude00", r"\x4", r"\07", r"\U0001f989"),
    *("True", "None", "null", "1.5", "1e9", "0x", "NaN", "f(", "a=", "functions.", " to=f"),
    *('{"name": "f", ', '"arguments": ', '"parameters": ', '{"name": "f", "arguments": {"a": '),
    *('"arguments": {}, "name": "f"', "[f(a=", "f(a=", '{"a": ', "{'a': ", "['a', ", '"a"', "'a' "),
)


class SlowText(NamedTuple):
    """Parts of a text: tokens, and the fraction of the length for which they are repeated."""

    parts: tuple[tuple[tuple[str, ...], float], ...]

    def of_length(self, chars: int) -> str:
        """Return a text of about `chars` characters. A part with fraction 0 occurs once."""
        whole = sum(share for _, share in self.parts) or 1.0
        pieces = []
        for tokens, share in self.parts:
            unit = "".join(tokens)
            times = int(chars * share / whole / len(unit)) if share and unit else 1
            pieces.append(unit * max(times, 1))
        return "".join(pieces)[:chars]


class TextCost(NamedTuple):
    """The CPU time of a text.

    Attributes:
        long: seconds for each of LONG_CHARS characters, estimated from shorter texts.
        text: the text.
        chars: number of characters parsed at a time.
    """

    long: float
    text: SlowText
    chars: int


def message_forms() -> dict[str, MessageForm]:
    """Return each way to parse an answer, by name: all tool call formats and reasoning tags."""
    forms: dict[str, MessageForm] = {
        form: MessageForm(
            tools=form,
            functions=_FUNCTIONS,
            custom=("f",),
            channel=harmony.TURN if form == "openai" else None,
        )
        for form in get_args(Form)
    }
    for name, tags in {tags: name for name, tags in TAGS.items()}.items():
        forms[f"reasoning {tags}"] = MessageForm(tools="hermes", reasoning=name)
    forms["forced"] = MessageForm(guided=ForcedCall())
    for named in (False, True):
        forms[f"either, named: {named}"] = MessageForm(guided=Either(named))
    return forms


def read_time(form: MessageForm, text: str, chars: int) -> float:
    """Return the CPU seconds for parsing a text in pieces of `chars` characters."""
    reader = MessageReader(form)
    pieces = [text[at : at + chars] for at in range(0, len(text), chars)]
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        started = time.thread_time()
        for piece in pieces:
            reader.read(piece)
        reader.finish()
        return time.thread_time() - started
    finally:
        if was_enabled:
            gc.enable()


def find_slowest(name: str, seconds: float, seed: int = 0) -> TextCost:
    """Return the most expensive text for the format `name` after `seconds` of CPU time."""
    form = message_forms()[name]
    draw = random.Random(f"{name} {seed}")
    words = [*_words(form)]

    def token() -> str:
        return draw.choice(_CHARS if draw.random() < 0.6 else words)

    def tokens(most: int) -> tuple[str, ...]:
        return tuple([token() for _ in range(draw.randint(1, most))])

    started = time.process_time()
    beginnings = _Beginnings(form)
    while time.process_time() - started < _BEGINNINGS_SHARE * seconds:
        begun = draw.choice(beginnings.found) if draw.random() < 0.8 else ()
        beginnings.add((*begun, *tokens(3)))
    found: list[TextCost] = []
    while time.process_time() - started < seconds or not found:
        if len(found) < _SURVIVORS or draw.random() < 0.7:
            parts = [(draw.choice(beginnings.found), 0.0), (tokens(3), 1.0)]
            if draw.random() < 0.3:
                parts.append((tokens(1), draw.choice((0.0, 1.0))))
            text = SlowText(tuple(parts))
        else:
            text = _mutate(draw, token, draw.choice(found).text, draw.choice(found).text)
        found.append(_cost(form, text, draw.choice((1, _CHARS_A_TOKEN, LONG_CHARS))))
        found.sort(key=lambda each: -each.long)
        del found[_SURVIVORS:]
    return found[0]


class _Beginnings:
    """Text beginnings that reach different lines of the parsers' code."""

    def __init__(self, form: MessageForm) -> None:
        self._form = form
        self._lines: set[tuple[str, int]] = set()
        self.found: list[tuple[str, ...]] = [()]

    def add(self, tokens: tuple[str, ...]) -> None:
        """Store the tokens if they make a parser run a line for the first time."""
        lines: set[tuple[str, int]] = set()

        def note(frame: FrameType, _event: str, _value: Any) -> Any:
            file = frame.f_code.co_filename
            if "/parsers/" not in file:
                return None
            lines.add((file, frame.f_lineno))
            return note

        reader = MessageReader(self._form)
        before = sys.gettrace()
        sys.settrace(note)
        try:
            reader.read("".join(tokens))
        finally:
            sys.settrace(before)
        if not lines <= self._lines:
            self._lines |= lines
            self.found.append(tokens)


def _cost(form: MessageForm, text: SlowText, chars: int) -> TextCost:
    short_size, long_size = _SIZES
    short = min(read_time(form, text.of_length(short_size), chars) for _ in range(2)) / short_size
    long = read_time(form, text.of_length(long_size), chars) / long_size
    if long < _MIN_GROWTH * short:
        return TextCost(long, text, chars)
    # Measure again, as other processes may have slowed the first measurement.
    long = min(long, read_time(form, text.of_length(long_size), chars) / long_size)
    growth = (long - short) / (long_size - short_size) if long > _MIN_GROWTH * short else 0.0
    return TextCost(long + growth * (LONG_CHARS - long_size), text, chars)


def _words(form: MessageForm) -> Iterator[str]:
    """Yield the format's tags, prefixes of the tags, and words common to all formats."""
    yield from _WORDS
    yield from ("f", "a", "o", "s")
    tags = {*form.markers()}
    parser = PARSERS.get(form.tools) if form.tools else None
    if isinstance(parser, TaggedForm):
        tags.update(_strings(dataclasses.asdict(parser)))
    for tag in sorted(filter(None, tags)):
        yield from (tag, tag, tag[:-1] or tag, tag[: len(tag) // 2] or tag)
    if isinstance(parser, TaggedForm):
        yield from _beginnings_of_calls(parser)


def _beginnings_of_calls(form: TaggedForm) -> Iterator[str]:
    call, name, parameters = form.openings[0], form.name, form.parameters
    if name is not None:
        call += name.opening if name.opening != call else ""
        call += f"{name.before}f{name.after}\n"
    yield call
    if parameters is not None:
        for key in "aosx":
            member = key.join(parameters.key) + parameters.value[0]
            yield from (call + member, member, parameters.value[1] + member)


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from _strings([*value.values()])
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _strings(each)


def _mutate(
    draw: random.Random, token: Callable[[], str], text: SlowText, other: SlowText
) -> SlowText:
    parts = [([*tokens], share) for tokens, share in text.parts]
    for _ in range(draw.randint(1, 3)):
        place = draw.randrange(len(parts))
        tokens, share = parts[place]
        match draw.randrange(6):
            case 0:
                tokens.insert(draw.randint(0, len(tokens)), token())
            case 1 if len(tokens) > 1:
                tokens.pop(draw.randrange(len(tokens)))
            case 2 if tokens:
                tokens[draw.randrange(len(tokens))] = token()
            case 3:
                parts[place] = (tokens, draw.choice((0.0, 1.0, 3.0)))
            case 4:
                parts.insert(place, ([token()], draw.choice((0.0, 1.0))))
            case _:
                taken, share = draw.choice(other.parts)
                parts[place] = ([*taken], share)
    return SlowText(tuple([(tuple(tokens), share) for tokens, share in parts[:_MAX_PARTS]]))


def _main() -> None:
    parser = argparse.ArgumentParser(description="Search for texts that are slow to read.")
    parser.add_argument("--seconds", type=float, default=30.0, help="CPU seconds for each form")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--only", nargs="*", help="names of forms")
    given = parser.parse_args()
    for name, form in message_forms().items():
        if given.only and name not in given.only:
            continue
        cost = find_slowest(name, given.seconds, given.seed)
        few, many = (
            min(read_time(form, cost.text.of_length(size), cost.chars) for _ in range(2))
            for size in (LONG_CHARS // 4, LONG_CHARS)
        )
        print(
            f"{name}: {many / LONG_CHARS * 1e6:.2f} us a character, {many / few:.2f} times as much "
            f"for 4 times the text, by {cost.chars}: {cost.text.parts}",
            flush=True,
        )


if __name__ == "__main__":
    _main()

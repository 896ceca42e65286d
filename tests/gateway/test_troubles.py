"""Troubles of a gateway: each is listed while it lasts, and logged once, even during a flood."""

from __future__ import annotations

import asyncio
import logging
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest

from gateway.conditions import poll_conditions
from gateway.tenancy.unknown_models import FORGET_AFTER_S, MAX_NAME_CHARS, UnknownModels
from gateway.troubles import MAX_CHARS, MAX_ITEMS_OF_KIND, Troubles

if TYPE_CHECKING:
    from gateway.service import Service

WARNING, ERROR = logging.WARNING, logging.ERROR


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def troubles(clock: Clock, caplog: pytest.LogCaptureFixture) -> Troubles:
    caplog.set_level(logging.INFO)
    return Troubles(clock)


def _logged(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    return [(record.levelname, record.getMessage()) for record in caplog.records]


def test_a_condition_is_logged_when_it_begins_changes_and_ends(
    troubles: Troubles, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    for text in ("no disk", "no disk", "disk full"):
        troubles.hold("disk", ERROR, text)
        clock.now += 1
    assert troubles.facts() == {"disk": {"level": "error", "text": "disk full", "since": 100.0}}
    troubles.clear("disk")
    troubles.clear("disk")
    assert troubles.facts() == {}
    assert _logged(caplog) == [
        ("ERROR", "no disk"),
        ("ERROR", "disk full"),
        ("INFO", "over: disk full"),
    ]
    troubles.hold("disk", ERROR, "disk full")
    assert _logged(caplog)[-1] == ("ERROR", "disk full")
    assert troubles.facts()["disk"]["since"] == 103.0


def test_counts_and_examples_are_listed_and_not_logged_again(
    troubles: Troubles, caplog: pytest.LogCaptureFixture
) -> None:
    for times in (1, 2, 3):
        troubles.hold("models", WARNING, "unknown", times=times, last=f"m{times}")
    facts = troubles.facts()["models"]
    assert (facts["times"], facts["last"]) == (3, "m3")
    assert _logged(caplog) == [("WARNING", "unknown; the last: m1")]


def test_a_change_of_the_level_alone_is_logged(
    troubles: Troubles, caplog: pytest.LogCaptureFixture
) -> None:
    troubles.hold("disk", WARNING, "slow")
    troubles.hold("disk", ERROR, "slow")
    assert _logged(caplog) == [("WARNING", "slow"), ("ERROR", "slow")]


def test_one_ends_and_those_of_like_names_stay(troubles: Troubles) -> None:
    troubles.hold("keys", WARNING, "a")
    troubles.hold("usage_log", ERROR, "b")
    troubles.hold_each("adapters", ERROR, {"acme": "c", "acme2": "d"})
    troubles.clear("keys")
    troubles.hold_each("adapters", ERROR, {"acme2": "d"})
    assert set(troubles.facts()) == {"usage_log", "adapters acme2"}


def test_the_worst_comes_first_then_the_oldest(troubles: Troubles, clock: Clock) -> None:
    troubles.hold("new", WARNING, "a")
    clock.now -= 50
    troubles.hold("old", WARNING, "b")
    clock.now += 90
    troubles.hold("bad", ERROR, "c")
    assert list(troubles.facts()) == ["bad", "old", "new"]


def test_a_flood_is_one_entry_and_pushes_nothing_out(
    troubles: Troubles, caplog: pytest.LogCaptureFixture
) -> None:
    troubles.hold("disk", WARNING, "full")
    troubles.hold_each("adapters", ERROR, {"zz": "the first"})
    troubles.hold_each("adapters", ERROR, {f"a{n}": "broken" for n in range(5000)} | {"zz": "x"})
    facts = troubles.facts()
    assert len(facts) == MAX_ITEMS_OF_KIND + 2
    assert facts["disk"]["text"] == "full"
    assert facts["adapters zz"]["text"] == "x"
    left = 5001 - MAX_ITEMS_OF_KIND
    assert facts["adapters others"]["text"] == f"{left} more of the same kind (adapters)"
    assert len(caplog.records) < MAX_ITEMS_OF_KIND + 5
    troubles.hold_each("adapters", ERROR, {})
    assert set(troubles.facts()) == {"disk"}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("a\nERROR forged", "a; ERROR forged"),
        ("a\r\n\n  b\u2028c", "a; b; c"),
        ("\x1b[31mred\x00", "�[31mred�"),
        ("\u202eright to left", "�right to left"),
        ("你好 é", "你好 é"),
    ],
)
def test_texts_are_one_line_without_control_characters(
    troubles: Troubles, caplog: pytest.LogCaptureFixture, text: str, told: str
) -> None:
    troubles.hold("disk", WARNING, text, last=text)
    troubles.hold_each("adapters", WARNING, {text: text})
    facts = troubles.facts()
    assert facts["disk"]["text"] == facts["disk"]["last"] == told
    assert facts[f"adapters {told}"]["text"] == told
    assert all("\n" not in message for _, message in _logged(caplog))


def test_long_texts_are_cut(troubles: Troubles) -> None:
    troubles.hold("disk", WARNING, "x" * 10_000_000)
    text = troubles.facts()["disk"]["text"]
    assert isinstance(text, str)
    assert len(text) == MAX_CHARS
    assert text.endswith("…")


def test_what_another_logs_is_not_logged_twice(
    troubles: Troubles, caplog: pytest.LogCaptureFixture
) -> None:
    troubles.hold("disk", ERROR, "full", logs=False)
    troubles.hold_each("adapters", ERROR, {"a": "broken"}, logs=False)
    assert len(troubles.facts()) == 2
    troubles.hold_each("adapters", ERROR, {}, logs=False)
    troubles.clear("disk", logs=False)
    assert caplog.records == []
    assert troubles.facts() == {}


def test_requests_for_unknown_models_are_summed_and_end(
    troubles: Troubles, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    unknown = UnknownModels(troubles, clock)
    for n in range(1000):
        unknown.count(f"m{n}")
    unknown.step()
    unknown.count("\n" * 10_000)
    unknown.step()
    (facts,) = troubles.facts().values()
    assert facts["times"] == 1001
    last = facts["last"]
    assert isinstance(last, str)
    assert last.startswith("'\\n\\n")
    assert len(last) <= 2 * MAX_NAME_CHARS + 2
    assert len(caplog.records) == 1
    unknown.count("x" * 10_000)
    unknown.step()
    assert troubles.facts()["unknown_models"]["last"] == repr("x" * MAX_NAME_CHARS)
    clock.now += FORGET_AFTER_S
    unknown.step()
    assert troubles.facts()
    clock.now += 1
    unknown.step()
    assert troubles.facts() == {}
    unknown.count("again")
    unknown.step()
    assert troubles.facts()["unknown_models"]["times"] == 1


async def test_what_cannot_be_found_is_named_without_the_words_of_its_error(
    troubles: Troubles,
) -> None:
    def fail() -> str:
        raise ValueError("a-secret")

    service = cast("Service", SimpleNamespace(troubles=troubles))
    async with poll_conditions(service, fail), asyncio.timeout(300):
        while "conditions" not in troubles.facts():
            await asyncio.sleep(0)
    text = troubles.facts()["conditions"]["text"]
    assert text == "some troubles cannot be found: ValueError"

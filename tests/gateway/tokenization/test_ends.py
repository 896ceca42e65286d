"""Which ids end an answer, and who is told: the engine, or the text behind a minimum."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gateway.generation.options import GenerationParams, Guide, Options
from gateway.parsers.harmony import TURN
from gateway.parsers.message import MessageForm
from gateway.parsers.reasoning import THINK
from gateway.tokenization.prompts import Prompts
from tests.support.small_tokenizers import BYTES, encode

END, FURTHER, ASKED = 7, 8, 9
STOP = tuple(encode("cat"))
GUIDE = Guide("json", "")
HELD = {"min_tokens": 3}


@pytest.fixture(scope="module")
def prompts() -> Prompts:
    return Prompts(BYTES, {}, [END, FURTHER])


@pytest.mark.parametrize(
    ("params", "ignore_eos", "end_id", "stop_ids", "later"),
    [
        ({}, False, END, (STOP, (ASKED,), (FURTHER,)), ()),
        ({}, True, None, (STOP, (ASKED,)), ()),
        # An engine would stop at once: it holds nothing back but its end id.
        (HELD, False, END, (), (ASKED, FURTHER)),
        (HELD, True, None, (), (ASKED,)),
        # An engine would find the strings in thoughts, too.
        ({"message": MessageForm(reasoning=THINK)}, False, END, ((ASKED,), (FURTHER,)), ()),
        ({"message": MessageForm(channel=TURN)}, False, END, ((ASKED,), (FURTHER,)), ()),
        ({"message": MessageForm("hermes")}, False, END, (STOP, (ASKED,), (FURTHER,)), ()),
        # Behind a guide's end nothing but ends can be chosen, so that one of them must end it.
        ({"guide": GUIDE}, True, END, (STOP, (ASKED,), (FURTHER,)), ()),
        ({"guide": GUIDE, **HELD}, True, END, ((ASKED,), (FURTHER,)), ()),
    ],
)
def test_what_ends_an_answer(
    prompts: Prompts,
    params: dict[str, Any],
    ignore_eos: bool,
    end_id: int | None,
    stop_ids: tuple[tuple[int, ...], ...],
    later: tuple[int, ...],
) -> None:
    options = Options(
        seed=1,
        params=replace(GenerationParams(stop=("cat",)), **params),
        stop_token_ids=(ASKED,),
        ignore_eos=ignore_eos,
    )
    assert prompts.end_id(options) == end_id
    assert prompts.stop_ids(options) == stop_ids
    assert prompts.later_end_ids(options) == frozenset(later)

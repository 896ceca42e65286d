"""Token ids that end an answer, at the engine or in the gateway's check after `min_tokens`."""

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
        # The engine applies min_tokens only to its end id. It would stop at once at any other id,
        # so the gateway checks those.
        (HELD, False, END, (), (ASKED, FURTHER)),
        (HELD, True, None, (), (ASKED,)),
        # The engine would also find the stop strings in the reasoning.
        ({"message": MessageForm(reasoning=THINK)}, False, END, ((ASKED,), (FURTHER,)), ()),
        ({"message": MessageForm(channel=TURN)}, False, END, ((ASKED,), (FURTHER,)), ()),
        ({"message": MessageForm("hermes")}, False, END, (STOP, (ASKED,), (FURTHER,)), ()),
        # After the guide's end only end ids can be sampled, so the engine stops despite ignore_eos.
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

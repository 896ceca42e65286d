"""Golden files of tool calls as each model writes them, and the parsed message.

`tests/data/tool_forms` has one file for each format, derived from published chat templates. `text`
is a list of lines.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from gateway.parsers.tools.forms import PARSERS
from gateway.parsers.tools.parser import Functions
from tests.support.tool_calls import calls_of, content_of, fold, parse_pieces

FILES = Path(__file__).parents[2] / "data" / "tool_forms"
FUNCTIONS: Functions = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "hourly": {"type": "boolean"},
            "at": {"type": "array", "items": {}},
            "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        },
    },
    "get_time": None,
}
CASES = [
    pytest.param(form, case, id=f"{form}-{number}")
    for form in PARSERS
    for number, case in enumerate(json.loads((FILES / f"{form}.json").read_text())["cases"])
]


@pytest.mark.parametrize(("form", "case"), CASES)
def test_each_form_is_read_wherever_it_is_cut(form: Any, case: dict[str, Any]) -> None:
    maker = partial(PARSERS[form], FUNCTIONS)
    text = "\n".join(case["text"])
    whole = parse_pieces(maker, text)
    assert content_of(whole) == case["content"]
    calls = [(call["name"], call["arguments"]) for call in case["tool_calls"]]
    assert calls_of(whole) == calls
    assert parse_pieces(maker, *text) == whole
    for size in range(1, len(text), 3):
        assert parse_pieces(maker, text[:size], text[size:]) == whole
    # After each character, the calls emitted so far are a prefix of the complete calls.
    parser, events = maker(), []
    for char in text:
        events += parser.parse(char)
        for said, meant in zip(calls_of(events), calls, strict=False):
            assert meant[0] == said[0]
            assert meant[1].startswith(said[1])
    assert fold(events + parser.finish()) == whole


def test_a_form_without_a_file_has_not_been_tried() -> None:
    assert {file.stem for file in FILES.iterdir()} == PARSERS.keys()

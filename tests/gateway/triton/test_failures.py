"""Logs of error messages from engines, which may quote text of clients."""

from __future__ import annotations

import logging

import pytest

from gateway.errors import EngineError
from gateway.triton.failures import Status, from_status, from_text


@pytest.mark.parametrize(
    ("text", "logged"),
    [
        ("Encountered an error: bad\nat /opt/x.cpp:3", "Encountered an error: bad"),
        ("\n\nbehind empty lines", "behind empty lines"),
        ("", "(empty)"),
        (" \n ", "(empty)"),
        ("clear \x1b[2J and \u202e turn", r"clear \x1b[2J and \u202e turn"),
        ("fine: é 你好", "fine: é 你好"),
        ("the prompt: " + "x" * 10**6, "the prompt: " + "x" * 488),
    ],
)
def test_it_is_one_short_line_that_does_nothing_to_a_terminal(
    text: str, logged: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR, "gateway.triton.failures"):
        assert isinstance(from_text(text), EngineError)
        from_status(Status.INTERNAL, text)
    assert caplog.messages == [f"engine error: {logged}"] * 2

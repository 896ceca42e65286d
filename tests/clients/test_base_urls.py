"""Clients with a wrong base URL: the 404 names the right one."""

from __future__ import annotations

from typing import Any

import anthropic
import httpx
import openai
import pytest

from tests.support.local_stack import Stack
from tests.support.patience import PATIENCE_S

SAID: Any = [{"role": "user", "content": "hi"}]
TOO_MANY, TOO_FEW, SLASH = "leave /v1 out of", "end the base URL with /v1", "Leave the slash"


@pytest.mark.parametrize(
    ("path", "meant", "advice"),
    [
        ("/v1/v1/messages", "/v1/messages", TOO_MANY),
        ("/v1/v1/messages/count_tokens", "/v1/messages/count_tokens", TOO_MANY),
        ("/v1/v1/chat/completions", "/v1/chat/completions", TOO_MANY),
        ("/messages", "/v1/messages", TOO_FEW),
        ("/chat/completions", "/v1/chat/completions", TOO_FEW),
        ("/responses", "/v1/responses", TOO_FEW),
        ("//v1/messages", "/v1/messages", SLASH),
        ("/v1/responses/", "/v1/responses", SLASH),
    ],
)
def test_the_404_names_the_path_that_was_meant(
    stack: Stack, path: str, meant: str, advice: str
) -> None:
    answer = httpx.post(stack.gateway + path, json={}, timeout=PATIENCE_S)
    assert answer.status_code == 404
    said = answer.json()["error"]["message"]
    assert said.startswith(f"Unknown URL: POST {path}. Did you mean {meant}? ")
    assert advice in said
    assert (answer.json().get("type") == "error") is meant.startswith("/v1/messages")


@pytest.mark.parametrize(
    "path",
    [
        *("/v1/nothing", "/nothing", "/v1/v1/nothing", "/v1/nothing/"),
        *("/v2/messages", "/v1/threads/t/messages", "/v1" * 999 + "/messages"),
    ],
)
def test_no_path_is_guessed_for_other_404s(stack: Stack, path: str) -> None:
    answer = httpx.post(stack.gateway + path, json={}, timeout=PATIENCE_S)
    assert answer.status_code == 404
    assert "Did you mean" not in answer.text
    assert len(answer.text) < 4000


def test_sdks_show_it(stack: Stack) -> None:
    with (
        anthropic.Anthropic(base_url=f"{stack.gateway}/v1", api_key="none") as claude,
        pytest.raises(anthropic.NotFoundError, match=r"mean /v1/messages\?.*leave /v1 out of"),
    ):
        claude.messages.create(model="demo", max_tokens=5, messages=SAID)
    with (
        openai.OpenAI(base_url=stack.gateway, api_key="none") as client,
        pytest.raises(openai.NotFoundError, match=r"mean /v1/chat/completions\?.*with /v1"),
    ):
        client.chat.completions.create(model="demo", max_tokens=5, messages=SAID)

"""Requests of popular programs: each is answered, or refused for a feature that would be missed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.support.local_stack import Stack

REPLAYED: dict[str, dict[str, Any]] = yaml.safe_load(
    (Path(__file__).parent / "replayed.yaml").read_text(encoding="utf-8")
)
CHAT = "/v1/chat/completions"


@pytest.mark.parametrize("name", REPLAYED)
def test_a_request(stack: Stack, name: str) -> None:
    fields = dict(REPLAYED[name])
    path, refused = fields.pop("path", CHAT), fields.pop("refused", None)
    ignored = fields.pop("ignored", None)
    own = {"messages": [{"role": "user", "content": "Hi"}]} if path == CHAT else {}
    answer = httpx.post(stack.gateway + path, json={"model": "demo"} | own | fields, timeout=60)
    if refused is not None:
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == refused
        return
    assert answer.status_code == 200, answer.text
    if fields.get("stream"):
        assert answer.text.endswith("data: [DONE]\n\n")
    else:
        assert answer.json()["choices"]
    found = answer.headers.get("x-ignored-parameters", "")
    assert sorted(found.split(", ")) == sorted((ignored or "").split(", "))

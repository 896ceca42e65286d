"""The playground's requests as code: each copied snippet is run."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from tests.support.browser import looking_at
from tests.support.gateway_process import GatewayProcess, tenant, write_config
from tests.support.local_stack import Stack

# Quotes, a dollar, a backslash and a line break, which each language escapes differently.
PROMPT = 'Repeat: it\'s "$HOME" \\n `x`\nparis 你好'
KEY = "sk-acme"
PARAMETERS = {
    "system": "Say 'yes'.",
    "temperature": "0",
    "top_k": "5",
    "repetition_penalty": "1.1",
    "min_tokens": "2",
    "max_tokens": "24",
    "seed": "7",
    "stop": "\\n\\n\nEND",
}

# The same parameters as an API request.
ASKED = {
    "model": "demo",
    "messages": [
        {"role": "system", "content": "Say 'yes'."},
        {"role": "user", "content": PROMPT},
    ],
    **{"temperature": 0, "top_k": 5, "repetition_penalty": 1.1, "min_tokens": 2},
    **{"max_tokens": 24, "seed": 7, "stop": ["\n\n", "END"]},
}


def _copied(browser: Browser, url: str, language: str, **fields: str) -> str:
    with looking_at(browser, url, refused=(401,)) as page:
        page.get_by_role("dialog", name="Key").get_by_label("Your key").fill(KEY)
        page.keyboard.press("Enter")
        expect(page.get_by_role("combobox")).to_have_value("demo")
        page.get_by_role("button", name="Parameters", exact=True).click()
        for name, value in fields.items():
            field = page.locator(f'[name="{name}"]')
            if name == "logprobs":
                field.check()
            else:
                field.fill(value)
        page.locator("#prompt").fill(PROMPT)
        page.get_by_role("button", name="Code", exact=True).click()
        dialog = page.get_by_role("dialog")
        dialog.get_by_role("tab", name=language).click()
        dialog.get_by_role("button", name="Copy").click()
        expect(page.get_by_role("status").filter(has_text="Copied.")).to_have_count(1)
        text: str = page.evaluate("navigator.clipboard.readText()")
    assert KEY not in text
    return text


def _run(folder: Path, language: str, code: str) -> str:
    if language == "curl":
        command = ["bash", "-euc", code]
    elif language == "Python":
        command = [sys.executable, "-c", code]
    else:
        (file := folder / "snippet.mjs").write_text(code, encoding="utf-8")
        command = ["node", str(file)]
    environment = os.environ | {"OPENAI_API_KEY": KEY}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("language", ["curl", "Python", "JavaScript"])
def test_what_is_copied_runs(browser: Browser, stack: Stack, tmp_path: Path, language: str) -> None:
    needed = {"curl": "curl", "JavaScript": "node"}.get(language)
    if needed and not shutil.which(needed):
        pytest.skip(f"the snippet for {language} needs {needed}, which is not installed")
    config = write_config(tmp_path / "c.yaml", tenant("acme", KEY))
    usage = tmp_path / "usage.jsonl"
    with GatewayProcess(tmp_path / "g", stack, config=config, usage_log=usage) as gateway:
        code = _copied(browser, gateway.url, language, **PARAMETERS)
        printed = _run(tmp_path, language, code)
        if language == "curl":
            printed = json.loads(printed)["choices"][0]["message"]["content"] + "\n"
        with gateway.client(KEY) as client:
            asked = client.post("/v1/chat/completions", json=ASKED).json()
        assert printed == asked["choices"][0]["message"]["content"] + "\n"
        # Another prompt could have the same answer, but hardly the same number of tokens too.
        lines = [json.loads(line) for line in usage.read_text(encoding="utf-8").splitlines()]
        assert len({line["prompt_tokens"] for line in lines}) == 1
        assert len(lines) == 2
        more = _copied(browser, gateway.url, language, logprobs="on", top_logprobs="1")
        assert "top_logprobs" in _run(tmp_path, language, more)

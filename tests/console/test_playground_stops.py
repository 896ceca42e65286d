"""Answers in the playground that end early, of an engine that needs minutes for all of one."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Locator, Page, expect

from tests.support.browser import PATIENCE_MS, Late, looking_at
from tests.support.gateway_process import GatewayProcess
from tests.support.local_stack import Stack
from tests.support.triton_server import LONG_ANSWER

expect.set_options(timeout=PATIENCE_MS)


@pytest.fixture
def page(browser: Browser, long_stack: Stack) -> Iterator[Page]:
    with looking_at(browser, long_stack.gateway) as page:
        yield page


def _button(page: Page | Locator, name: str) -> Locator:
    return page.get_by_role("button", name=name, exact=True)


def _begun(page: Page) -> Locator:
    """Ask for a long answer, and return it once it shows its first text."""
    expect(page.get_by_role("combobox", name="Model", exact=True)).to_have_value("demo")
    _button(page, "Parameters").click()
    for name in ("max_tokens", "min_tokens"):
        page.locator(f'[name="{name}"]').fill(str(LONG_ANSWER))
    _button(page, "Close the parameters").click()
    page.locator("#prompt").fill("Count.")
    page.locator("#prompt").press("Enter")
    answer = page.get_by_role("article", name=re.compile("^Answer of"))
    expect(answer.locator(".markdown").last).not_to_be_empty()
    return answer


def test_a_stop_is_seen_through_to_the_engine(page: Page) -> None:
    answer = _begun(page)
    _button(answer, "Stop").click()
    expect(answer.locator(".stopped")).to_have_text(
        re.compile(r"^Stopped after .*s\. The engine was free .*s later\.$")
    )
    # The stop button below the prompt stops all answers.
    _button(answer, "Again").click()
    _button(page.locator("#composer"), "Stop").click()
    expect(answer.locator(".stopped")).to_contain_text("Stopped after")


@pytest.mark.slow
def test_buttons_stay_when_it_is_told_that_the_engine_is_free(page: Page) -> None:
    freed = Late(page, "requests/*")
    answer = _begun(page)
    _button(answer, "Stop").click()
    _button(answer, "Again").focus()
    freed.answer()
    expect(answer.locator(".stopped")).to_contain_text("The engine was free")
    expect(_button(answer, "Again")).to_be_focused()


def test_a_connection_that_is_lost_is_told_in_words(
    browser: Browser, long_stack: Stack, tmp_path: Path
) -> None:
    with (
        GatewayProcess(tmp_path / "g", long_stack) as gateway,
        looking_at(browser, gateway.url, refused=(0,)) as page,
    ):
        answer = _begun(page)
        gateway.process.kill()
        expect(answer).to_contain_text("The connection was lost before the end.")
        expect(answer.locator(".markdown").last).not_to_be_empty()

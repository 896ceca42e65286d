"""Buttons stay visible and clickable despite long names."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Locator, Page, expect

from tests.support.browser import PATIENCE_MS, PHONE, looking_at, overflows
from tests.support.key_dialog import asked_for_key
from tests.support.local_stack import Stack
from tests.support.operated_gateway import ADMIN, OperatedGateway
from tests.support.operators_page import operating

expect.set_options(timeout=PATIENCE_MS)

PARIS = "What is the capital of France?"
LONG_TITLE = "Capitals of all countries and their rivers " * 8
LONG_ADAPTER = "acme/" + ("adapter-of-a-long-name-" * 3)[:63] + "z"
OF_THE_API = re.compile("header|authorization|bearer|API|`", re.IGNORECASE)


@pytest.fixture
def page(browser: Browser, stack: Stack) -> Iterator[Page]:
    with looking_at(browser, stack.gateway) as page:
        expect(page.get_by_role("combobox", name="Model", exact=True)).to_have_value("demo")
        yield page


def _click(page: Page, target: Locator) -> None:
    """Click at the middle of `target`, which must be in the window and not covered."""
    expect(target).to_be_in_viewport(ratio=1)
    box = target.bounding_box()
    assert box is not None
    x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    page.mouse.move(x, y)
    seen = "(node, [x, y]) => node.contains(document.elementFromPoint(x, y))"
    assert target.evaluate(seen, [x, y]), target
    page.mouse.click(x, y)


def _ask(page: Page, prompt: str) -> None:
    page.locator("#prompt").fill(prompt)
    page.locator("#prompt").press("Enter")
    expect(page.locator("#send")).to_be_visible()


def _turns(page: Page) -> Locator:
    return page.get_by_role("region", name="Turn", exact=True)


def _open_edit_box(page: Page, turn: Locator) -> Locator:
    _click(page, turn.get_by_role("button", name="Edit the prompt"))
    return turn.get_by_role("textbox", name="Prompt")


def test_conversations_of_long_titles_are_renamed_and_deleted(page: Page) -> None:
    _ask(page, "x" * 400)
    page.get_by_role("button", name="Conversations", exact=True).click()
    rows = page.locator("#conversations").get_by_role("listitem")
    _click(page, rows.get_by_role("button", name="Rename"))
    page.keyboard.type(LONG_TITLE)
    page.keyboard.press("Enter")
    page.get_by_role("button", name="New conversation").click()
    _ask(page, "Hello")
    expect(rows).to_have_count(2)
    for title in ("Hello", "Capitals"):
        row = rows.filter(has_text=title)
        row.hover()
        _click(page, row.get_by_role("button", name="Rename"))
        page.keyboard.type("Short" if title == "Hello" else LONG_TITLE)
        page.keyboard.press("Enter")
    for left, title in ((1, "Capitals"), (0, "Short")):
        row = rows.filter(has_text=title)
        row.hover()
        _click(page, row.get_by_role("button", name="Delete"))
        expect(rows).to_have_count(left)


def test_a_finger_needs_no_pointer_over_a_conversation(browser: Browser, stack: Stack) -> None:
    with looking_at(browser, stack.gateway, size=PHONE, has_touch=True, is_mobile=True) as page:
        _ask(page, "Hello")
        page.get_by_role("button", name="Conversations", exact=True).click()
        page.get_by_role("button", name="New conversation").click()
        _ask(page, "Hi")
        page.get_by_role("button", name="Conversations", exact=True).click()
        other = page.locator("#conversations li:not(.current)").get_by_role("button", name="Rename")
        expect(other).to_have_css("opacity", "1")


def test_enter_sends_an_edited_prompt(page: Page) -> None:
    _ask(page, "Hello")
    box = _open_edit_box(page, _turns(page).first)
    box.fill("Repeat: one")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("two")
    expect(box).to_have_value("Repeat: one\ntwo")
    # Enter during composition picks a character, as in Chinese or Japanese input.
    box.dispatch_event("keydown", {"key": "Enter", "isComposing": True, "bubbles": True})
    expect(box).to_be_visible()
    page.keyboard.press("Enter")
    expect(page.get_by_role("article", name="Prompt")).to_have_text("Repeat: one\ntwo")
    expect(box).to_have_count(0)


def test_the_hint_of_the_edit_box_is_true_for_each_turn(page: Page) -> None:
    dropped = "The turns after this one are dropped."
    _ask(page, "Hello")
    box = _open_edit_box(page, _turns(page).first)
    hint = _turns(page).first.locator("form .hint")
    expect(hint).to_contain_text("Enter sends")
    expect(hint.get_by_text(dropped)).to_be_hidden()
    expect(box).to_have_accessible_description("Enter sends, Shift+Enter begins a line.")
    _ask(page, PARIS)  # the edit box stays open
    expect(hint.get_by_text(dropped)).to_be_visible()
    _open_edit_box(page, _turns(page).last)
    last = _turns(page).last.locator("form .hint")
    expect(last.get_by_text(dropped)).to_be_hidden()


def test_no_line_of_facts_ends_with_a_dot(page: Page) -> None:
    _ask(page, PARIS)
    facts = page.locator(".facts")
    expect(facts.locator("li")).not_to_have_count(0)
    facts.evaluate("list => { list.style.width = '150px'; }")
    found = facts.evaluate(
        """list => {
          const { left, right } = list.getBoundingClientRect();
          return [...list.children].map((fact, n, all) => {
            const own = fact.getBoundingClientRect();
            const dot = own.left + parseFloat(getComputedStyle(fact, "::before").left);
            const isFirst = n === 0 || own.top > all[n - 1].getBoundingClientRect().top;
            const isSeen = dot >= left - 1 || getComputedStyle(list).overflowX !== "clip";
            return { isFirst, isSeen, ends: getComputedStyle(fact, "::after").content };
          });
        }"""
    )
    assert sum(fact["isFirst"] for fact in found) > 1, found
    for fact in found:
        assert fact["isSeen"] != fact["isFirst"], found
        assert fact["ends"] == "none", found


def test_a_key_is_asked_for_in_a_persons_words(
    browser: Browser, stack: Stack, tmp_path: Path
) -> None:
    with asked_for_key(browser, stack, tmp_path) as (page, dialog):
        expect(dialog).to_contain_text("This server needs a key")
        expect(dialog).not_to_contain_text(OF_THE_API)
        dialog.get_by_role("button", name="Cancel").click()
        notice = page.locator("#composer-notice")
        expect(notice).to_contain_text("Give a key under Key")
        expect(notice).not_to_contain_text(OF_THE_API)


@pytest.fixture(scope="module")
def long_named(two_engines: OperatedGateway) -> Iterator[OperatedGateway]:
    """Yield a gateway with two versions of an adapter with a long name."""
    for demo in ("zh", "ja"):
        two_engines.upload(LONG_ADAPTER, demo)
    yield two_engines
    two_engines.admin("DELETE", f"/v1/adapters/{LONG_ADAPTER}")


def test_adapters_are_changed_on_a_phone(browser: Browser, long_named: OperatedGateway) -> None:
    with operating(browser, long_named.url, ADMIN, size=PHONE, has_touch=True) as it:
        adapters = it.view("Adapters")
        scroller = adapters.locator(".matrix")
        expect(it.row("adapters", LONG_ADAPTER)).to_be_visible()
        assert scroller.evaluate("node => node.scrollWidth <= node.clientWidth")
        _click(it.page, it.button(f"Roll back {LONG_ADAPTER}…"))
        _click(it.page, it.dialog.get_by_role("button", name="Cancel"))
        _click(it.page, it.button(f"Versions of {LONG_ADAPTER}…"))
        serve = it.dialog.get_by_role("button", name="Serve").first
        serve.scroll_into_view_if_needed()
        served = it.dialog.locator(".sideways")
        assert served.evaluate("node => node.scrollWidth <= node.clientWidth")
        _click(it.page, serve)
        _click(it.page, it.dialog.get_by_role("button", name="Roll back"))
        for name in ("Verify…", "Add a version…", "Remove…"):
            _click(it.page, it.dialog.get_by_role("button", name=name))
            _click(it.page, it.dialog.get_by_role("button", name="Cancel"))
        _click(it.page, it.dialog.get_by_role("button", name="Done"))
        _click(it.page, adapters.get_by_role("button", name="Add an adapter…"))
        _click(it.page, it.dialog.get_by_role("button", name="Cancel"))
        assert not overflows(it.page)


def test_buttons_stay_in_sight_beside_many_replicas(
    browser: Browser, long_named: OperatedGateway
) -> None:
    with operating(browser, long_named.url, ADMIN, size=PHONE) as it:
        it.view("Adapters")
        it.page.evaluate(
            """async () => {
                const { store } = await import('/web/operators/store.js');
                (await import('/web/operators/stream.js')).stop();
                const [replica] = Object.values(store.state.replicas);
                const names = [...Array(24).keys()].map((n) => `10.0.0.${n}:8001`);
                const replicas = Object.fromEntries(names.map((name) => [name, replica]));
                store.replace({ ...store.state, replicas });
            }"""
        )
        expect(it.page.locator(".matrix .head .place")).to_have_count(24)
        it.page.locator(".matrix").evaluate("node => { node.scrollLeft = 10_000; }")
        _click(it.page, it.button(f"Versions of {LONG_ADAPTER}…"))
        expect(it.dialog).to_contain_text("Versions of")

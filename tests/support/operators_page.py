"""The operators' page as a person uses it, with a counter of clicks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from playwright.sync_api import Browser, Locator, Page, expect

from tests.support.browser import PATIENCE_MS, looking_at

expect.set_options(timeout=PATIENCE_MS)
WIDE = (1440, 900)


class OperatorsPage:
    """The page. `clicks` counts the clicks of `click`, `view` and `confirm`."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.clicks = 0

    def open(self, key: str) -> None:
        self.page.get_by_label("Key", exact=True).fill(key)
        self.button("Open").click()
        expect(self.page.locator("#link")).to_have_text("Live")

    def button(self, name: str) -> Locator:
        return self.page.get_by_role("button", name=name, exact=True)

    def click(self, locator: Locator) -> None:
        self.clicks += 1
        locator.click()

    def view(self, name: str) -> Locator:
        """Click the link to a view and return its section."""
        views = self.page.get_by_role("navigation", name="Views")
        self.click(views.get_by_role("link", name=name))
        section = self.page.locator(f"#{name.lower()}")
        expect(section).to_be_visible()
        return section

    @property
    def dialog(self) -> Locator:
        """The topmost dialog."""
        return self.page.locator("dialog[open]").last

    def confirm(self, name: str) -> None:
        """Click the dialog's confirming button, and wait until the action is done."""
        title = self.dialog.get_by_role("heading").inner_text()
        self.click(self.dialog.get_by_role("button", name=name, exact=True))
        heading = self.page.get_by_role("heading", name=title, exact=True)
        expect(self.page.locator("dialog[open]", has=heading)).to_have_count(0)

    def row(self, view: str, text: str) -> Locator:
        """Return the first row with this text, in a table or in the list of tenants."""
        rows = self.page.locator(f"#{view} :is(.row, tbody > tr, li.tenant)")
        return rows.filter(has_text=text).first


@contextmanager
def operating(browser: Browser, url: str, key: str, **options: Any) -> Iterator[OperatorsPage]:
    """Open the page with the click counter at 0. The page must log no error.

    It must contact no other host either.
    """
    with looking_at(browser, f"{url}/operators", **{"size": WIDE} | options) as page:
        operators = OperatorsPage(page)
        operators.open(key)
        yield operators

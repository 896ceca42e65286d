"""Console pages in a real browser, checked for logged errors, requests and accessibility."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, ConsoleMessage, Page, Route

from docs.browser import chromium, running_chromium

# Time limit in ms for a page on a busy machine, only for a test that hangs.
PATIENCE_MS = 60_000
DESKTOP, PHONE = (1280, 800), (375, 740)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Run one browser per test file: Playwright's thread occupies the event loop meanwhile."""
    if chromium() is None:
        pytest.skip("this test needs a browser: apt-get install chromium-headless-shell")
    with running_chromium() as browser:
        yield browser


class WatchedPage:
    """A page's logged errors, and its requests to other hosts."""

    def __init__(self, page: Page, url: str) -> None:
        self._origin = urlsplit(url)[:2]
        self.errors: list[str] = []
        self.abroad: list[str] = []
        page.on("console", self._logged)
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("request", lambda request: self._asked(request.url))

    def _logged(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.errors.append(f"{message.text} ({message.location.get('url', '')})")

    def _asked(self, url: str) -> None:
        if urlsplit(url)[:2] != self._origin:
            self.abroad.append(url)


@contextmanager
def looking_at(
    browser: Browser,
    url: str,
    *,
    size: tuple[int, int] = DESKTOP,
    dark: bool = False,
    refused: tuple[int, ...] = (),
    **options: Any,
) -> Iterator[Page]:
    """Open the page at `url` in a new profile. It must log no error and contact no other host.

    `refused` are HTTP statuses that the page may receive, or 0 if its connection may be lost. The
    browser logs each of these as an error.
    """
    context = browser.new_context(
        viewport={"width": size[0], "height": size[1]},
        color_scheme="dark" if dark else "light",
        permissions=["clipboard-read", "clipboard-write"],
        **options,
    )
    context.set_default_timeout(PATIENCE_MS)
    page = context.new_page()
    watched = WatchedPage(page, url)
    try:
        page.goto(url)
        yield page
        unexpected = [
            error
            for error in watched.errors
            if not any(said in error for status in refused for said in _logged_for(status))
        ]
        assert unexpected == []
        assert watched.abroad == []
    finally:
        context.close()


def _logged_for(status: int) -> tuple[str, ...]:
    if status:
        return (f"responded with a status of {status} ",)
    return "net::ERR_CONNECTION_RESET", "net::ERR_INCOMPLETE_CHUNKED_ENCODING"


class Late:
    """Requests of the page to a path, held back until the test answers them."""

    def __init__(self, page: Page, path: str) -> None:
        self._page = page
        self._path = f"**/v1/{path}"
        self._asked: list[Route] = []
        page.route(self._path, self._ask)

    def _ask(self, route: Route) -> None:
        self._asked.append(route)

    def wait_until_asked(self) -> None:
        while not self._asked:
            self._page.wait_for_timeout(10)

    def answer(self) -> None:
        self.wait_until_asked()
        for route in self._asked:
            route.continue_()
        self._page.unroute(self._path)

    def refuse(self, status: int, message: str) -> None:
        """Answer the held requests with an error, without a gateway."""
        self.wait_until_asked()
        for route in self._asked:
            route.fulfill(status=status, json={"error": {"message": message}})
        self._page.unroute(self._path)

    def lose(self) -> None:
        self.wait_until_asked()
        for route in self._asked:
            route.abort("connectionreset")
        self._page.unroute(self._path)


def cpu_of(page: Page) -> Callable[[], float]:
    """Return a function that returns the CPU seconds of the page's main thread."""
    session = page.context.new_cdp_session(page)
    session.send("Performance.enable", {"timeDomain": "threadTicks"})

    def seconds() -> float:
        metrics = session.send("Performance.getMetrics")["metrics"]
        return float(next(each["value"] for each in metrics if each["name"] == "TaskDuration"))

    return seconds


def barriers(page: Page) -> list[str]:
    """Return axe's findings on the current page, a line for each element."""
    found = Axe().run(page).response["violations"]
    return [
        f"{rule['id']}: {node['target']}: {node['failureSummary']}"
        for rule in found
        for node in rule["nodes"]
    ]


def overflows(page: Page) -> bool:
    """Return True if the page is wider than the window."""
    wide: bool = page.evaluate("document.documentElement.scrollWidth > innerWidth")
    return wide

"""Headless Chromium for screenshots and page tests, controlled by Playwright.

The browser is Debian's package, which you install with apt. Playwright downloads no browser.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from playwright.sync_api import Browser, sync_playwright

# Executables in the order of preference. The headless shell is first, because page tests need only
# half the CPU time with it: it has no windows, tabs or extensions.
_NAMES = ("chromium-headless-shell", "chromium", "chromium-browser")
# Turn off the sandbox, which does not work for root in containers, and the background services,
# which would send requests to other machines.
_FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    # Turn off font hinting, so that machines with the same fonts render identical screenshots.
    *("--font-render-hinting=none", "--hide-scrollbars"),
)


def chromium() -> str | None:
    """Return the path of Chromium; None if Chromium is not installed."""
    return next((path for name in _NAMES if (path := shutil.which(name))), None)


@contextmanager
def running_chromium(environment: Mapping[str, str] | None = None) -> Iterator[Browser]:
    """Run Chromium with the environment variables of this process and `environment`."""
    path = chromium()
    assert path is not None, "there is no Chromium: apt-get install chromium-headless-shell"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=path, args=list(_FLAGS), env=os.environ | dict(environment or {})
        )
        try:
            yield browser
        finally:
            browser.close()

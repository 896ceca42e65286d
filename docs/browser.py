"""Debian's Chromium, for screenshots and tests: the system's, never a downloaded one."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from playwright.sync_api import Browser, sync_playwright

# The headless shell has no windows, tabs or extensions: page tests need half the CPU time in it.
_NAMES = ("chromium-headless-shell", "chromium", "chromium-browser")
# No sandbox, because root in containers has none; and no requests to other machines.
_FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    # Two machines then draw letters identically, if they have the same fonts.
    *("--font-render-hinting=none", "--hide-scrollbars"),
)


def chromium() -> str | None:
    """Return the path of Chromium; None if it is not installed."""
    return next((path for name in _NAMES if (path := shutil.which(name))), None)


@contextmanager
def running_chromium(environment: Mapping[str, str] | None = None) -> Iterator[Browser]:
    """Run Chromium; `environment` is added to this process' variables."""
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

"""Debian's Chromium for screenshots and tests. It is installed by apt, never downloaded here."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from playwright.sync_api import Browser, sync_playwright

# Prefer the headless shell: it has no windows, tabs or extensions, so page tests need half the CPU
# time.
_NAMES = ("chromium-headless-shell", "chromium", "chromium-browser")
# Use no sandbox, because it does not work for root in containers. Send no requests to other
# machines.
_FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    # Make two machines with the same fonts draw letters identically.
    *("--font-render-hinting=none", "--hide-scrollbars"),
)


def chromium() -> str | None:
    """Return the path of Chromium; None if Chromium is not installed."""
    return next((path for name in _NAMES if (path := shutil.which(name))), None)


@contextmanager
def running_chromium(environment: Mapping[str, str] | None = None) -> Iterator[Browser]:
    """Run Chromium with the environment of this process, plus `environment`."""
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

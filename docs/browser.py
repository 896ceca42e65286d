"""Debian's Chromium, for screenshots and tests: the one of the system, never a downloaded one."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from playwright.sync_api import Browser, sync_playwright

# The shell has no windows, tabs or extensions to keep: pages of tests take half the CPU time in it.
_NAMES = ("chromium-headless-shell", "chromium", "chromium-browser")
# No sandbox: in containers, root has none. And nothing that asks other machines by itself.
_FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    # Two machines draw letters alike, as far as they have the same fonts.
    *("--font-render-hinting=none", "--hide-scrollbars"),
)


def chromium() -> str | None:
    """Its path; None where there is none."""
    return next((path for name in _NAMES if (path := shutil.which(name))), None)


@contextmanager
def running_chromium(environment: Mapping[str, str] | None = None) -> Iterator[Browser]:
    """`environment` has what it is given beside ours."""
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

"""The playground of a gateway with tenants, while it shows the dialog for a key."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from playwright.sync_api import Browser, Locator, Page

from tests.support.browser import looking_at
from tests.support.gateway_process import GatewayProcess, tenant, write_config
from tests.support.local_stack import Stack


@contextlib.contextmanager
def asked_for_key(browser: Browser, stack: Stack, folder: Path) -> Iterator[tuple[Page, Locator]]:
    """Yield the page and its dialog; the tenant `acme` has the key `sk-acme`."""
    config = write_config(folder / "c.yaml", tenant("acme", "sk-acme"))
    with (
        GatewayProcess(folder / "g", stack, config=config) as gateway,
        looking_at(browser, gateway.url, refused=(401,)) as page,
    ):
        yield page, page.get_by_role("dialog", name="Key")

"""The admin port in a browser: its first page is the operators' page, which needs no other port."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from tests.support.browser import looking_at
from tests.support.gateway_process import GatewayProcess, tenant, write_config
from tests.support.local_stack import Stack
from tests.support.operated_gateway import ADMIN
from tests.support.operators_page import OperatorsPage

pytestmark = pytest.mark.slow

KEY = "sk-the-key-of-acme"


def test_its_first_page_is_the_operators(browser: Browser, stack: Stack, tmp_path: Path) -> None:
    own = {"config": write_config(tmp_path / "c.yaml", tenant("acme", KEY)), "admin_key": ADMIN}
    with GatewayProcess(tmp_path / "g", stack, admin_port=0, **own) as gateway:
        url = f"http://127.0.0.1:{gateway.admin_port}/"
        with looking_at(browser, url, refused=(401,)) as page:
            operators = OperatorsPage(page)
            gate = page.get_by_label("Key", exact=True)
            # The form says where an admin key comes from, and refuses a tenant's key.
            expect(gate).to_have_accessible_description(re.compile("gateway key new --admin"))
            gate.fill(KEY)
            operators.button("Open").click()
            expect(page.get_by_role("alert")).to_have_text("Incorrect admin key provided.")

            operators.open(ADMIN)
            for view in ("Replicas", "Adapters", "Tenants", "Requests"):
                operators.view(view)
            operators.view("Tenants")
            operators.row("tenants", "acme").locator("summary").click()
            operators.button("Make a key for acme…").click()
            operators.dialog.get_by_role("button", name="Make").click()
            made = operators.dialog.get_by_role("textbox")
            expect(made).to_have_value(re.compile("^sk-"))
            with gateway.client(made.input_value()) as acme:
                assert acme.get("/v1/models").status_code == 200
        # The API port has the playground at the same path, without the operators' page.
        with looking_at(browser, gateway.url, refused=(401,)) as page:
            expect(page.get_by_role("heading", name="Playground")).to_be_visible()

"""Operators' tasks, each in at most three clicks, with real engines."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, expect

from tests.support.operated_gateway import ADMIN, TIGHT, OperatedGateway
from tests.support.operators_page import OperatorsPage, operating

pytestmark = pytest.mark.slow

MOST_CLICKS = 3
_TIME = re.compile(r"^[\d.,]+ m?s$")


@pytest.fixture
def page(browser: Browser, real: OperatedGateway) -> Iterator[OperatorsPage]:
    with operating(browser, real.url, ADMIN) as page:
        yield page
        assert 0 < page.clicks <= MOST_CLICKS


def test_which_replica_holds_an_adapter(page: OperatorsPage, real: OperatedGateway) -> None:
    assert real.ask(model="zh").status_code == 200
    held = real.until(lambda state: state["adapters"]["zh"]["replicas"])["adapters"]["zh"][
        "replicas"
    ]
    page.view("Adapters")
    page.page.keyboard.type("zh")
    for replica in real.tritons.replicas:
        place = page.row("adapters", "zh").get_by_title(replica.endpoint)
        known = held.get(replica.endpoint, {"state": "cold"})["state"]
        expect(place).to_have_attribute("data-state", known)
        expect(place).to_have_text(known)
    assert "held" in [place["state"] for place in held.values()]
    assert page.clicks == 1


def test_an_engine_holds_a_content_once_for_all_its_names(real: OperatedGateway) -> None:
    """Check that names with equal adapter content show the same replicas.

    A name whose older version has that content does not.
    """
    for name, demo in (("one", "zh"), ("two", "zh"), ("other", "zh"), ("other", "ja")):
        real.upload(name, demo)
    assert real.ask(model="one").status_code == 200
    state = real.until(lambda state: state["adapters"].get("one", {}).get("replicas"))
    places = {name: state["adapters"][name]["replicas"] for name in ("one", "two", "other", "ja")}
    assert places["one"] == places["two"] != {}
    assert places["other"] == places["ja"]


def test_why_a_tenant_is_refused(page: OperatorsPage, real: OperatedGateway) -> None:
    assert [real.ask(TIGHT).status_code for _ in range(2)] == [200, 429]
    # The overview shows the refusal. A click shows the limits.
    troubles = page.page.get_by_role("list", name="What needs you")
    expect(troubles).to_contain_text("limit of requests a minute")
    page.click(troubles.get_by_role("link", name="Look at tight"))
    tight = page.row("tenants", "tight")
    expect(tight).to_contain_text("limit of requests a minute")
    expect(tight.get_by_role("list", name="Limits of tight")).to_contain_text("of 1")
    expect(page.page.locator("#tenants li.tenant")).to_have_count(1)
    assert page.clicks == 1


def test_stop_this_request(page: OperatorsPage, real: OperatedGateway) -> None:
    with real.running() as (request_id,):
        page.view("Requests")
        page.click(page.button(f"Stop {request_id}…"))
        expect(page.dialog).to_contain_text("token")
        page.confirm("Stop it")
        ended = page.page.get_by_role("table", name="Requests that have ended")
        row = ended.locator(".row").filter(has=page.page.get_by_title(request_id))
        expect(row).to_contain_text("stopped by an operator")
        # The row shows how long the engine took to stop.
        expect(row.locator(".stop")).to_have_text(_TIME)
        assert request_id not in real.state()["requests"]
    real.tritons.wait_idle()
    assert page.clicks == MOST_CLICKS


def test_roll_back_an_adapter(page: OperatorsPage, real: OperatedGateway) -> None:
    first, second = real.upload("z", "zh")["served"], real.upload("z", "ja")["served"]
    page.view("Adapters")
    row = page.page.get_by_role("row").filter(has=page.button("Versions of z…"))
    expect(row).to_contain_text(second)
    page.click(page.button("Roll back z…"))
    expect(page.dialog).to_contain_text(second)
    expect(page.dialog.get_by_role("radio", name=first)).to_be_checked()
    page.confirm("Roll back")
    assert real.admin("GET", "/v1/adapters/z").json()["served"] == first
    expect(page.page.locator("#told")).to_have_text(f"z is now served as {first}.")
    expect(row).to_contain_text(first)
    assert page.clicks == MOST_CLICKS


def test_drain_replica_2(page: OperatorsPage, real: OperatedGateway) -> None:
    second = sorted(replica.endpoint for replica in real.tritons.replicas)[1]
    with real.running(4):
        page.view("Replicas")
        page.click(page.button(f"Drain… {second}, replica 2"))
        expect(page.dialog).to_contain_text("other replicas go on with them")
        page.confirm("Drain")
        expect(page.row("replicas", second)).to_contain_text("draining")
        # The drained replica's requests continue on the other replica, and none fails.
        state = real.until(lambda state: state["replicas"][second]["in_flight"] == 0)
        assert len(state["requests"]) == 4
    assert page.clicks == MOST_CLICKS

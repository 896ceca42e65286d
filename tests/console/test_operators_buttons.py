"""Each button of the operators' page, once, with real engines: its messages and its effect."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, expect

from tests.support.browser import Late, looking_at
from tests.support.operated_gateway import ADMIN, DEMO_ADAPTERS, OperatedGateway
from tests.support.operators_page import OperatorsPage, operating

pytestmark = pytest.mark.slow

HOSTILE = "<img src=x onerror=\"document.title='hacked'\"><script>document.title='hacked'</script>"


@pytest.fixture
def page(browser: Browser, real: OperatedGateway) -> Iterator[OperatorsPage]:
    with operating(browser, real.url, ADMIN) as page:
        yield page


def test_weigh_use_again_and_give_back(page: OperatorsPage, real: OperatedGateway) -> None:
    first, second = sorted(replica.endpoint for replica in real.tritons.replicas)
    replicas = page.view("Replicas")
    replicas.get_by_role("button", name=f"Weight of {first}…").click()
    page.dialog.get_by_label("Weight").fill("300")
    expect(page.dialog).to_contain_text("About 75 % of the requests.")
    page.confirm("Set the weight")
    row = page.row("replicas", first)
    expect(row.get_by_role("cell", name="300", exact=True)).to_be_visible()
    set_here = row.get_by_text("set here, not in the file")
    expect(set_here).to_be_visible()

    replicas.get_by_role("button", name=f"Drain… {first}").click()
    page.confirm("Drain")
    expect(row).to_contain_text("draining")
    replicas.get_by_role("button", name=f"Drain… {second}").click()
    expect(page.dialog).to_contain_text("No other replica is ready")
    page.dialog.get_by_role("button", name="Cancel").click()
    replicas.get_by_role("button", name=f"Use again… {first}").click()
    page.confirm("Use again")
    expect(row).to_contain_text("ready")

    replicas.get_by_role("button", name=f"Give {first} back to the file…").click()
    page.confirm("Give back")
    expect(set_here).to_be_hidden()
    assert real.until(lambda state: state["replicas"][first]["weight"] == 100)


def test_add_serve_verify_and_remove_an_adapter(page: OperatorsPage, real: OperatedGateway) -> None:
    adapters = page.view("Adapters")
    adapters.get_by_role("button", name="Add an adapter…").click()
    page.dialog.get_by_label("Name").fill("acme/new")
    page.dialog.get_by_label("Folder").set_input_files(DEMO_ADAPTERS / "zh")
    expect(page.dialog).to_contain_text("acme/new is a new adapter")
    page.confirm("Add")
    first = real.admin("GET", "/v1/adapters/acme/new").json()["served"]
    expect(page.row("adapters", "acme/new")).to_contain_text(first)

    versions = page.button("Versions of acme/new…")
    versions.click()
    page.dialog.get_by_role("button", name="Add a version…").click()
    expect(page.dialog.get_by_label("Name")).to_have_value("acme/new")
    page.dialog.get_by_label("Folder").set_input_files(DEMO_ADAPTERS / "ja")
    expect(page.dialog).to_contain_text(f"in place of {first}")
    page.confirm("Add")
    second = real.admin("GET", "/v1/adapters/acme/new").json()["served"]
    assert second != first
    expect(page.dialog.get_by_role("row", name=second)).to_contain_text("served")

    page.dialog.get_by_role("button", name=f"Serve {first}…").click()
    page.confirm("Roll back")
    expect(page.dialog.get_by_role("row", name=first)).to_contain_text("served")
    page.dialog.get_by_role("button", name="Verify…").click()
    expect(page.dialog).to_contain_text("Reads 2 versions")
    page.confirm("Verify")
    expect(page.page.locator("#told")).to_contain_text("are as they were added")
    page.dialog.get_by_role("button", name="Done").click()
    expect(versions).to_be_focused()

    versions.click()
    page.dialog.get_by_role("button", name="Remove…").click()
    page.confirm("Remove acme/new")
    expect(page.row("adapters", "acme/new")).not_to_be_attached()
    expect(page.page.locator("dialog")).to_have_count(0)
    assert real.admin("GET", "/v1/adapters/acme/new").status_code == 404


def test_what_is_no_adapter_is_said_and_the_question_stays(
    browser: Browser, real: OperatedGateway
) -> None:
    with operating(browser, real.url, ADMIN, refused=(400,)) as page:
        page.view("Adapters").get_by_role("button", name="Add an adapter…").click()
        page.dialog.get_by_label("Name").fill("other")
        page.dialog.get_by_label("Base model").fill("llama")
        page.dialog.get_by_label("Folder").set_input_files(DEMO_ADAPTERS / "zh")
        page.dialog.get_by_role("button", name="Add", exact=True).click()
        # The gateway's own error message.
        expect(page.dialog.get_by_role("alert")).to_contain_text("found llama; allowed: demo")
        page.dialog.get_by_label("Base model").fill("demo")
        page.confirm("Add")
        expect(page.row("adapters", "other")).to_be_visible()


@pytest.mark.parametrize(
    ("status", "told"), [(409, "Not done"), (504, "It may not be done"), (0, "It may not be done")]
)
def test_what_fails_behind_a_closed_question_is_told(
    browser: Browser, real: OperatedGateway, status: int, told: str
) -> None:
    with operating(browser, real.url, ADMIN, refused=(status,)) as page:
        drained = Late(page.page, "admin/replicas/*")
        page.view("Replicas").get_by_role("button", name="Drain…").first.click()
        page.dialog.get_by_role("button", name="Drain", exact=True).click()
        drained.wait_until_asked()
        page.page.keyboard.press("Escape")
        expect(page.dialog).to_have_count(0)
        if status:
            drained.refuse(status, "Redis is away.")
        else:
            drained.lose()
        why = "Redis is away" if status else "does not answer"
        expect(page.page.locator("#told")).to_have_text(re.compile(f"^{told}: .*{why}"))


def test_what_was_done_is_not_told_as_failed(page: OperatorsPage) -> None:
    page.page.evaluate(
        """async () => {
            window.onunhandledrejection = (event) => {
                event.preventDefault();
                window.reason = event.reason.message;
            };
            const { ask } = await import("/web/operators/dialogs.js");
            const done = () => { throw new Error("broken words"); };
            ask({ title: "Sure?", effects: [], confirm: "Do it", does: async () => null, done });
        }"""
    )
    page.confirm("Do it")
    page.page.wait_for_function("window.reason === 'broken words'")
    expect(page.page.locator("#told")).to_be_empty()


def test_make_copy_and_revoke_a_key(page: OperatorsPage, real: OperatedGateway) -> None:
    tenants = page.view("Tenants")
    tenants.get_by_role("searchbox").fill("acme")
    acme = page.row("tenants", "acme")
    acme.get_by_text("1 key").click()
    expect(acme.get_by_role("table")).to_contain_text("in the file")
    acme.get_by_role("button", name="Make a key for acme…").click()
    page.dialog.get_by_label("Note").fill(HOSTILE)
    page.dialog.get_by_label("Valid").select_option("30 days")
    page.confirm("Make the key")
    shown = page.dialog.get_by_label("The key for acme")
    key = shown.input_value()
    page.dialog.get_by_role("button", name="Copy").click()
    expect(page.dialog).to_contain_text("Copied.")
    assert page.page.evaluate("navigator.clipboard.readText()") == key
    page.dialog.get_by_role("button", name="Done").click()
    assert key not in page.page.content()

    assert real.ask(key).status_code == 200
    # The admin's note is shown as text, not HTML.
    row = acme.get_by_role("row").filter(has_text=HOSTILE)
    expect(row).to_be_visible()
    assert page.page.locator("#tenants img, #tenants script").count() == 0
    row.get_by_role("button", name="Revoke").click()
    expect(page.dialog).to_contain_text(HOSTILE)
    page.confirm("Revoke")
    expect(row).not_to_be_attached()
    assert real.ask(key).status_code == 401
    assert "hacked" not in page.page.title()


def test_charts_have_words_and_figures(page: OperatorsPage, real: OperatedGateway) -> None:
    assert real.ask(max_tokens=50, ignore_eos=True).status_code == 200
    real.until(lambda state: any(p["tokens"] for p in state["history"]["points"].values()))
    for title in (
        "Tokens a second",
        "First token",
        "Waiting",
        "Errors in 10 s",
        "Cold sends in 10 s",
    ):
        chart = page.page.locator("figure.chart").filter(has_text=title)
        words = chart.get_by_role("img").get_attribute("aria-label") or ""
        assert words.startswith(f"{title} in the last 10 min: now "), words
        chart.get_by_text("Figures").click()
        expect(chart.get_by_role("table").get_by_role("row")).not_to_have_count(1)


def test_leave_and_come_back(page: OperatorsPage) -> None:
    page.view("Tenants")
    expect(page.row("tenants", "acme")).to_be_visible()
    page.button("Forget the key").click()
    expect(page.page.get_by_label("Key", exact=True)).to_be_focused()
    assert "acme" not in page.page.content()
    page.page.get_by_label("Key", exact=True).fill(ADMIN)
    page.page.keyboard.press("Enter")
    expect(page.row("tenants", "acme")).to_be_visible()


def test_dark_and_light(page: OperatorsPage) -> None:
    ground = "getComputedStyle(document.body).backgroundColor"
    before = page.page.evaluate(ground)
    page.button("Dark").click()
    assert page.page.evaluate(ground) != before


def test_a_wrong_key_opens_nothing(browser: Browser, real: OperatedGateway) -> None:
    with looking_at(browser, f"{real.url}/operators", refused=(401,)) as page:
        page.get_by_label("Key", exact=True).fill("sk-wrong")
        page.get_by_role("button", name="Open").click()
        expect(page.get_by_role("alert")).to_have_text("Incorrect admin key provided.")
        expect(page.locator("#inside")).to_be_hidden()


def test_not_live_is_seen_and_ends(browser: Browser, real: OperatedGateway) -> None:
    with operating(browser, real.url, ADMIN, refused=(502,)) as page:
        page.view("Adapters")
        expect(page.row("adapters", "zh")).to_be_visible()
        # A proxy between page and gateway fails, and the page reconnects its event stream.
        events = "**/v1/admin/events"
        page.page.route(events, lambda route: route.fulfill(status=502, body="Bad Gateway"))
        page.page.evaluate(
            "import('/web/operators/stream.js').then((stream) => stream.start(() => {}))"
        )
        expect(page.page.locator("#link")).to_have_text("Not live")
        expect(page.page.locator("#broken")).to_contain_text("Not live: Bad Gateway The data shown")
        expect(page.row("adapters", "zh")).to_be_visible()
        page.page.unroute(events)
        page.button("Try now").click()
        expect(page.page.locator("#link")).to_have_text("Live")
        expect(page.page.locator("#broken")).to_be_hidden()

"""The operators' page: accessibility, keyboard, phones, and untrusted text."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Locator, Response, expect

from tests.support.browser import PHONE, barriers, looking_at, overflows
from tests.support.merge_patches import OF_OBJECTS, OF_OTHERS
from tests.support.operated_gateway import ADMIN, STRANGE, OperatedGateway
from tests.support.operators_page import OperatorsPage, operating

VIEWS = ("Overview", "Replicas", "Adapters", "Tenants", "Requests")
MOST_BYTES = 150_000
HOSTILE = "<img src=x onerror=\"document.title='hacked'\"><script>document.title='hacked'</script>"


@pytest.fixture
def page(browser: Browser, real: OperatedGateway) -> Iterator[OperatorsPage]:
    with operating(browser, real.url, ADMIN) as page:
        yield page


def test_before_the_state_has_come_there_is_nothing_to_show(
    browser: Browser, real: OperatedGateway
) -> None:
    """Check that a page without its state shows no error, even when the pointer is over a chart."""
    with looking_at(browser, f"{real.url}/operators") as page:
        page.route("**/v1/admin/events", lambda route: None)
        page.get_by_label("Key", exact=True).fill(ADMIN)
        page.get_by_role("button", name="Open").click()
        for chart in page.locator("figure.chart").all():
            chart.locator("svg").hover()
            chart.get_by_text("Figures").click()
            expect(chart).not_to_contain_text("undefined")
        for view in VIEWS:
            page.get_by_role("navigation", name="Views").get_by_role("link", name=view).click()
            expect(page.locator(f"#{view.lower()} h2")).to_be_visible()
            expect(page.locator("main .row, main tbody tr, main li")).to_have_count(0)


def test_strangers_words_are_text(page: OperatorsPage) -> None:
    """Check that untrusted strings in the state are shown as text in each view."""
    page.page.evaluate(
        """async (hostile) => {
            const { store } = await import('/web/operators/store.js');
            (await import('/web/operators/stream.js')).stop();
            const walk = (value) => {
                if (typeof value === 'string') return hostile;
                if (typeof value !== 'object') return value;
                const entries = Object.entries(value).map(([name, of]) => [name, walk(of)]);
                return Object.fromEntries(entries);
            };
            const { time, gateway, replicas, adapters, tenants, ended } = store.state;
            const [endpoint, replica] = Object.entries(replicas)[0];
            const [, adapter] = Object.entries(adapters)[0];
            const failed = { ...replica, last_failure: { time, message: '' } };
            const key = { note: '', from: '', last_used: time };
            const limits = { [hostile]: { limit: 1, used: 1 } };
            const refused = { refused: { [hostile]: 1 }, last_refusal: { time, why: '' } };
            const request = { tenant: '', model: '', replica: '', state: '', started: time };
            store.replace(walk({ time, gateway,
                replicas: { [hostile]: failed },
                adapters: { [hostile]: { ...adapter, versions: { [hostile]: { source: '' } },
                    replicas: { [hostile]: { state: '', why: '' } } } },
                tenants: { [hostile]: { keys: { [hostile]: key }, limits, ...refused } },
                requests: { [hostile]: request },
                ended: { [hostile]: { ...request, ended: time, status: 200, error: '' } } }));
        }""",
        HOSTILE,
    )
    for view in VIEWS:
        section = page.view(view)
        expect(section).to_contain_text("<img" if view != "Requests" else "<script>")
    page.page.locator("#tenants summary").evaluate("node => node.click()")
    strange = "main :is(img, script, iframe, b:not(.place b)), main [onerror]"
    assert page.page.locator(strange).count() == 0
    assert page.page.title() != "hacked"


def test_many_refused_tenants_leave_room_for_the_rest(page: OperatorsPage) -> None:
    """Check that nine refused tenants are summarized in one entry, as while no engine is available.

    Refusals due to a client's mistake need no action and are left out.
    """
    page.page.evaluate(
        """async () => {
            const { store } = await import('/web/operators/store.js');
            (await import('/web/operators/stream.js')).stop();
            const { time, tenants: { acme } } = store.state;
            const refused = (why, more) => ({ ...acme, last_refusal: { time, why, ...more } });
            const tenants = {};
            for (let n = 0; n < 9; n += 1) tenants[`tenant-${n}`] = refused('engine_unavailable');
            const mistake = refused('model_not_found', { mistake: true });
            for (let n = 0; n < 3; n += 1) tenants[`wrong-${n}`] = mistake;
            store.replace({ ...store.state, tenants });
        }"""
    )
    troubles = page.page.get_by_role("list", name="What needs you").get_by_role("listitem")
    expect(troubles).to_have_count(6)
    expect(troubles.last).to_contain_text("4 more tenants were refused lately.")
    expect(page.page.locator('nav a[href="#overview"] .count')).to_have_text("9")
    troubles.last.get_by_role("link").click()
    expect(page.page.locator("#tenants li.tenant")).to_have_count(9)
    page.page.get_by_label("Show").select_option("all")
    expect(page.page.locator("#tenants li.tenant")).to_have_count(12)


@pytest.mark.slow
@pytest.mark.parametrize("dark", [False, True])
def test_nothing_keeps_people_out(browser: Browser, real: OperatedGateway, dark: bool) -> None:
    """Check each view and each type of dialog with axe-core, beginning with the key form."""
    with looking_at(browser, f"{real.url}/operators", dark=dark) as page:
        assert barriers(page) == []
    with real.running(), operating(browser, real.url, ADMIN, dark=dark) as it:
        for view in VIEWS:
            it.view(view)
            if view == "Tenants":
                it.row("tenants", "acme").locator("summary").click()
            assert barriers(it.page) == [], view
        it.page.get_by_role("button", name="Stop").first.click()
        assert barriers(it.page) == []
        it.page.keyboard.press("Escape")
        it.view("Adapters")
        for name in ("Versions of zh…", "Add an adapter…"):
            it.button(name).click()
            assert barriers(it.page) == [], name
            it.page.keyboard.press("Escape")


def test_a_keyboard_is_enough(page: OperatorsPage, real: OperatedGateway) -> None:
    """Check that a replica can be drained with Tab, Enter and Escape alone."""
    second = sorted(replica.endpoint for replica in real.tritons.replicas)[1]
    _tab_to(page, page.page.get_by_role("link", name="Replicas").first)
    page.page.keyboard.press("Enter")
    expect(page.page.get_by_role("heading", name="Replicas")).to_be_focused()
    drain = page.page.get_by_role("button", name=f"{second}, replica 2")
    _tab_to(page, drain)
    page.page.keyboard.press("Enter")
    expect(page.dialog.get_by_role("button", name="Drain", exact=True)).to_be_focused()
    page.page.keyboard.press("Escape")
    expect(drain).to_be_focused()
    page.page.keyboard.press("Enter")
    page.page.keyboard.press("Enter")
    expect(page.row("replicas", second)).to_contain_text("draining")
    expect(drain).to_be_focused()
    page.page.keyboard.press("Enter")
    page.confirm("Use again")
    expect(page.row("replicas", second)).to_contain_text("ready")


def _tab_to(page: OperatorsPage, wanted: Locator) -> None:
    for _ in range(60):
        page.page.keyboard.press("Tab")
        if wanted.evaluate("node => node === document.activeElement"):
            return
    raise AssertionError("not reached")


def test_a_phone_shows_it_without_sideways(browser: Browser, real: OperatedGateway) -> None:
    with real.running(), operating(browser, real.url, ADMIN, size=PHONE) as it:
        for view in VIEWS:
            it.view(view)
            assert not overflows(it.page), view
            wide = it.page.evaluate("document.querySelector('main').scrollWidth - innerWidth")
            assert wide <= 0, view
        # The important cells of a request and its button fit on the screen.
        for cell in ("model", "of", "at", "age", "tokens", "actions"):
            expect(it.page.locator(f"#requests .running .row .{cell}").first).to_be_in_viewport()


def test_it_is_light(browser: Browser, real: OperatedGateway) -> None:
    page = browser.new_page()
    responses: list[Response] = []

    def came(response: Response) -> None:
        responses.append(response)

    page.on("response", came)
    page.goto(f"{real.url}/operators", wait_until="networkidle")
    sizes = {response.url: len(response.body()) for response in responses}
    page.close()
    print(f"\n{len(sizes)} files, {sum(sizes.values())} bytes before they are packed")
    assert len(sizes) > 20
    assert sum(sizes.values()) < MOST_BYTES


def test_a_request_is_found_by_the_id_that_its_client_has(
    page: OperatorsPage, real: OperatedGateway
) -> None:
    with real.running(), real.running(headers={"x-request-id": "the-one"}):
        requests = page.view("Requests")
        requests.get_by_role("searchbox").fill("the-one")
        expect(requests.locator(".running .row")).to_have_count(1)


def test_a_name_may_mean_something_to_javascript(page: OperatorsPage) -> None:
    page.view("Tenants")
    expect(page.row("tenants", STRANGE)).to_contain_text("requests/min")
    assert page.page.evaluate("({}).limits === undefined && ({}).keys === undefined")


def test_a_patch_changes_what_the_rfc_says(page: OperatorsPage) -> None:
    merged = """async ([target, patch]) => {
        const { merged } = await import('/web/operators/merge_patch.js');
        return merged(target, patch);
    }"""
    for target, patch, wanted in OF_OBJECTS + OF_OTHERS:
        assert page.page.evaluate(merged, [target, patch]) == wanted, (target, patch)


def test_no_prompt_and_no_answer_is_in_it(page: OperatorsPage, real: OperatedGateway) -> None:
    with real.running(2, prompt="a secret of the client's"):
        page.view("Requests")
        expect(page.page.locator("#requests .running .row")).to_have_count(2)
        assert "secret" not in page.page.content()
        assert "secret" not in str(real.state())

"""A thousand adapters on twenty replicas: rendering and the CPU time per frame.

The test pushes a scripted state into the page's own modules. The rest of the page is as served.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, expect

from tests.support.browser import cpu_of, looking_at
from tests.support.cpu import measure_slowness
from tests.support.local_stack import Stack
from tests.support.operators_page import WIDE, OperatorsPage

pytestmark = pytest.mark.slow

ADAPTERS, REPLICAS, REQUESTS = 1000, 20, 200
FRAMES = 60
FRAME_MS = 1000 / 60
"""The duration of a frame at 60 frames per second."""
NOW = 1795213200.0

_ENDPOINTS = [f"10.0.0.{n}:8001" for n in range(1, REPLICAS + 1)]
_PLACES = ("held", "cold", "loading")


def _adapter(n: int) -> dict[str, Any]:
    places = {
        endpoint: {"state": _PLACES[(n + m) % 3 if n % 5 else 1], "evicted": (n + m) % 3}
        for m, endpoint in enumerate(_ENDPOINTS[: n % REPLICAS])
    }
    digest = f"{n:012x}"
    version = {"bytes": 1000 * n, "rank": 8, "created": NOW, "source": "upload"}
    versions = {digest: version, f"f{n:011x}": version}
    return {
        "served": digest,
        "requests_per_minute": n % 50,
        "versions": versions,
        "replicas": places,
    }


def _state() -> dict[str, Any]:
    replica = {"state": "ready", "weight": 1.0, "drain": False, "in_flight": 3, "places": 8}
    request = {"tenant": "acme", "model": "a-0001", "state": "running", "started": NOW - 5}
    points = {str(int(NOW) - 10 * n): {"tokens": n % 90, "ttft_p50_ms": n % 40} for n in range(360)}
    return {
        "time": NOW,
        "gateway": {"version": "0.1.0", "model": "demo", "started": NOW - 99, "ready": True},
        "replicas": dict.fromkeys(_ENDPOINTS, replica),
        "adapters": {f"a-{n:04}": _adapter(n) for n in range(ADAPTERS)},
        "tenants": {},
        "requests": {
            f"{n:032x}": request | {"replica": _ENDPOINTS[n % REPLICAS], "completion_tokens": n}
            for n in range(REQUESTS)
        },
        "ended": {},
        "history": {"step": 10, "points": points},
    }


@pytest.fixture
def full(browser: Browser, stack: Stack) -> Iterator[OperatorsPage]:
    """Yield the page with all adapters. After that, only the test changes the state."""
    event = f"event: state\ndata: {json.dumps(_state())}\n\n"
    headers = {"content-type": "text/event-stream"}
    with looking_at(browser, f"{stack.gateway}/operators", size=WIDE) as page:
        page.route("**/v1/admin/events", lambda route: route.fulfill(body=event, headers=headers))
        operators = OperatorsPage(page)
        page.get_by_label("Key", exact=True).fill("any")
        operators.button("Open").click()
        # Wait for the initial state, as the page ignores events after `stop`.
        expect(page.locator("nav a[href='#adapters'] .count")).to_have_text("1,000")
        page.evaluate("""async () => {
            const { store } = await import('/web/operators/store.js');
            (await import('/web/operators/stream.js')).stop();
            store.setLink({ kind: 'live' });
            window.store = store;
        }""")
        yield operators


def test_only_rows_that_are_seen_are_in_the_document(full: OperatorsPage) -> None:
    adapters = full.view("Adapters")
    table = adapters.get_by_role("table")
    expect(table).to_have_attribute("aria-rowcount", str(ADAPTERS + 1))
    expect(full.row("adapters", "a-0000")).to_be_visible()
    assert adapters.locator(".row").count() < 60
    # The last row is reached by a single scroll, and the document has the rows in order.
    full.page.locator(".matrix").evaluate("box => (box.scrollTop = box.scrollHeight)")
    expect(full.row("adapters", "a-0999")).to_be_in_viewport()
    full.page.locator(".matrix").press("Shift")
    names = adapters.locator(".row .name").all_inner_texts()
    assert names == sorted(names)
    assert names[-1] == "a-0999"
    assert len(names) < 60


def test_typing_finds_one_of_a_thousand(full: OperatorsPage) -> None:
    adapters = full.view("Adapters")
    full.page.keyboard.type("a-0777")  # the search field has the focus
    expect(adapters.locator(".row")).to_have_count(1)
    expect(adapters.get_by_role("status")).to_have_text("1 of 1,000 adapters")
    adapters.get_by_role("searchbox").fill(f"{123:012x}")  # a version's digest
    expect(adapters.locator(".row .name")).to_have_text(["a-0123"])
    adapters.get_by_role("searchbox").fill("")
    adapters.get_by_label("Order").select_option("busiest first")
    expect(adapters.locator(".row .name").first).to_have_text("a-0049")
    adapters.get_by_label("Order").select_option("largest first")
    expect(adapters.locator(".row .name").first).to_have_text("a-0999")


@pytest.mark.parametrize(("shown", "state"), [("loading", "loading"), ("held somewhere", "held")])
def test_a_choice_of_states_shows_those(full: OperatorsPage, shown: str, state: str) -> None:
    adapters = full.view("Adapters")
    adapters.get_by_label("Show").select_option(shown)
    wanted = sum(
        any(place["state"] == state for place in _adapter(n)["replicas"].values())
        for n in range(ADAPTERS)
    )
    assert 0 < wanted < ADAPTERS
    expect(adapters.get_by_role("status")).to_have_text(f"{wanted} of 1,000 adapters")


def test_only_what_has_changed_is_touched(full: OperatorsPage) -> None:
    adapters = full.view("Adapters")
    expect(full.row("adapters", "a-0001")).to_be_visible()
    touched = full.page.evaluate(
        """async (endpoint) => {
            const next = () => new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
            await next();
            const seen = [];
            const watch = new MutationObserver((records) => seen.push(...records));
            watch.observe(document.querySelector('#adapters'),
                { subtree: true, childList: true, attributes: true, characterData: true });
            store.patch({ adapters: { 'a-0001': { requests_per_minute: 4321 },
                'a-0002': { replicas: { [endpoint]: { state: 'held', evicted: 77 } } },
                'a-0900': { requests_per_minute: 4321 } } });
            await next();
            seen.push(...watch.takeRecords());
            return [...new Set(seen.map((record) => {
                const node = record.target;
                const element = node.nodeType === 1 ? node : node.parentElement;
                const cell = element.closest('[role=cell]');
                const name = cell?.closest('.row').querySelector('.name').textContent;
                return `${name} ${cell?.className}`;
            }))].sort();
        }""",
        _ENDPOINTS[3],
    )
    # Only cells on screen change: the limit, and the replica's state and number of evictions.
    assert touched == ["a-0001 number", "a-0002 number", "a-0002 place mark"]
    expect(full.row("adapters", "a-0001")).to_contain_text("4,321")
    assert adapters.locator(".row").count() < 60


@pytest.mark.parametrize("view", ["Adapters", "Requests"])
def test_rows_may_go_while_they_are_scrolled(full: OperatorsPage, view: str) -> None:
    """Check rows that are removed between a scroll event and its animation frame."""
    section = full.view(view)
    expect(section.locator(".row").first).to_be_visible()
    full.page.evaluate(
        """(part) => {
            document.querySelector(`#${part} .scroller`).scrollTop += 400;
            const gone = Object.keys(store.state[part]).map((name) => [name, null]);
            store.patch({ [part]: Object.fromEntries(gone) });
        }""",
        view.lower(),
    )
    expect(section.locator(".row")).to_have_count(0)


def test_an_adapter_may_go_while_its_versions_are_shown(full: OperatorsPage) -> None:
    full.view("Adapters")
    full.button("Versions of a-0001…").click()
    serve = full.dialog.get_by_role("button", name=f"Serve f{1:011x}…")
    expect(serve).to_be_visible()
    full.page.evaluate("store.patch({ adapters: { 'a-0001': null } })")
    expect(full.dialog).to_contain_text("This adapter has been removed.")
    serve.click()
    expect(full.page.locator("dialog")).to_have_count(1)


_SCROLL = """async ([frames, changes]) => {
    const names = Object.keys(store.state.adapters), endpoints = Object.keys(store.state.replicas);
    const box = document.querySelector('.matrix');
    const took = [];
    let n = 0, before = performance.now();
    for (let frame = 0; frame < frames; frame += 1) {
        if (changes) {
            const change = { time: store.state.time + 1, adapters: {}, replicas: {} };
            for (const name of names) {
                change.adapters[name] = { requests_per_minute: (n += 7) % 50 };
            }
            for (const [m, endpoint] of endpoints.entries()) {
                change.replicas[endpoint] = { in_flight: (n + m) % 9 };
                for (let k = 0; k < 10; k += 1) {
                    const state = ['held', 'cold', 'loading', 'lacking'][(n + k) % 4];
                    const name = names[(frame * 3 + k) % names.length];
                    change.adapters[name].replicas = { [endpoint]: { state } };
                }
            }
            store.patch(change);
        }
        if (box) box.scrollTop = (frame * 120) % (box.scrollHeight - box.clientHeight);
        await new Promise((resolve) => requestAnimationFrame(resolve));
        took.push(performance.now() - before);
        before = performance.now();
    }
    return took;
}"""


@pytest.mark.parametrize("view", ["Adapters", "Replicas", "Requests", "Overview"])
def test_a_frame_costs_less_than_its_time(full: OperatorsPage, view: str) -> None:
    """Measure CPU time of the page's main thread, in milliseconds of a quiet machine.

    The page scrolls 7,200 pixels per second, first alone and then with changes to all adapters and
    replicas in each frame.
    """
    section = full.view(view)
    expect(section.locator("h2")).to_be_visible()
    busy = cpu_of(full.page)
    costs, frames = {}, {}
    for kind, changes in (("scrolled", False), ("changed", True)):
        before = busy()
        took = sorted(full.page.evaluate(_SCROLL, [FRAMES, changes]))
        costs[kind] = (busy() - before) * 1000 / FRAMES / measure_slowness()
        frames[kind] = f"p50 {took[FRAMES // 2]:.1f} ms, p99 {took[-1]:.1f} ms"
    told = ", ".join(
        f"{kind}: {cost:.1f} ms of CPU, frames {frames[kind]}" for kind, cost in costs.items()
    )
    print(f"\n{view}: {told}")
    assert costs["scrolled"] < FRAME_MS
    # Such a change comes once per second, so one of sixty frames may be late.
    assert costs["changed"] < 2 * FRAME_MS

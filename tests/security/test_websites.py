"""A gateway without keys on a developer's machine, and requests from web pages they visit."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser

from gateway.api.websites import _is_local_name
from tests.support.browser import browser
from tests.support.gateway_process import GatewayProcess, body, tenant, write_config
from tests.support.local_stack import Stack
from tests.support.metrics import metric
from tests.support.patience import PATIENCE_S

__all__ = ["browser"]

KEY = "sk-the-key-of-acme"
COUNTED = "gateway_completion_tokens_total"
# A "no-cors" request needs no CORS preflight: for a browser it is like a form.
PAGE = """<script>
const sent = {method: "POST", mode: "no-cors", body: %s};
fetch("%s/v1/completions", sent).then(() => { document.title = "sent"; });
</script>"""


def _ask(url: str, headers: dict[str, str], path: str = "/v1/completions") -> httpx.Response:
    if path == "/v1/completions":
        return httpx.post(url + path, json=body(), headers=headers, timeout=PATIENCE_S)
    return httpx.get(url + path, headers=headers, timeout=PATIENCE_S)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/models", "/v1/requests/x", "/metrics"])
def test_a_website_whose_name_leads_here_is_refused(stack: Stack, path: str) -> None:
    answer = _ask(stack.gateway, {"host": "rebound.example:9000"}, path)
    assert answer.status_code == 403
    assert answer.json()["error"]["message"].startswith("host: found 'rebound.example:9000'")
    ours = _ask(stack.gateway, {"host": "localhost:9000"}, path)
    assert ours.status_code == (404 if path == "/v1/requests/x" else 200)


def test_details_of_readiness_are_not_for_websites(stack: Stack) -> None:
    for host, told in (("localhost", True), ("rebound.example", False)):
        answer = httpx.get(
            f"{stack.gateway}/health/ready", headers={"host": host}, timeout=PATIENCE_S
        )
        assert (answer.status_code, "engine" in answer.json()) == (200, told)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"sec-fetch-site": "cross-site", "origin": "https://website.example"}, 403),
        ({"sec-fetch-site": "cross-site", "origin": "null"}, 403),
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"sec-fetch-site": "cross-site", "origin": "chrome-extension://abc"}, 200),
        ({"sec-fetch-site": "same-origin", "origin": "http://localhost:9000"}, 200),
        ({"sec-fetch-site": "same-site", "origin": "http://localhost:3000"}, 200),
        ({"sec-fetch-site": "none"}, 200),
    ],
)
def test_what_a_page_of_another_site_sends_is_refused(
    stack: Stack, headers: dict[str, str], status: int
) -> None:
    assert _ask(stack.gateway, headers).status_code == status


def test_what_a_page_only_reads_is_for_the_browser_to_keep_from_it(stack: Stack) -> None:
    """Check that GET from other sites is allowed, as for links to the console.

    The browser hides the answer from the page.
    """
    headers = {"sec-fetch-site": "cross-site", "origin": "https://website.example"}
    assert _ask(stack.gateway, headers, "/v1/models").status_code == 200


@pytest.fixture
def website() -> Iterator[tuple[str, dict[str, str]]]:
    """Yield a website's URL, and a dict of its pages by path."""
    pages: dict[str, str] = {}

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            page = pages.get(self.path, "").encode()
            self.send_response(200)
            self.send_header("content-type", "text/html")
            self.end_headers()
            self.wfile.write(page)

        def log_message(self, *_: object) -> None: ...

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever).start()
        yield f"http://localhost:{server.server_port}", pages
        server.shutdown()


def test_a_browser_sends_it_and_the_engine_does_nothing(
    stack: Stack, browser: Browser, website: tuple[str, dict[str, str]]
) -> None:
    """Check that a browser's cross-site request is refused: `localhost` is not `127.0.0.1`."""
    url, pages = website
    assert "127.0.0.1" in stack.gateway
    pages["/attack"] = PAGE % (json.dumps(json.dumps(body())), stack.gateway)
    before = metric(f"{stack.gateway}/metrics", COUNTED)
    page = browser.new_page()
    page.goto(f"{url}/attack")
    page.wait_for_function("document.title === 'sent'")
    page.close()
    assert metric(f"{stack.gateway}/metrics", COUNTED) == before


def test_who_is_let_in_by_the_operator_is_let_in(stack: Stack, tmp_path: Path) -> None:
    """Check any host with `allow_anonymous`, origins in `cors_origins`, and requests with a key."""
    site = {"sec-fetch-site": "cross-site", "origin": "https://app.example"}
    by_name = {"host": "llm.example"}
    more: dict[str, Any] = {"allow_anonymous": True, "cors_origins": '["https://app.example"]'}
    with GatewayProcess(tmp_path / "open", stack, **more) as gateway:
        assert _ask(gateway.url, by_name | site).status_code == 200
        other = site | {"origin": "https://other.example"}
        assert _ask(gateway.url, by_name | other).status_code == 403
    every: dict[str, Any] = {"cors_origins": '["*"]'}
    with GatewayProcess(tmp_path / "every", stack, **every) as gateway:
        assert _ask(gateway.url, site).status_code == 200
        assert _ask(gateway.url, by_name | site).status_code == 403
    config = write_config(tmp_path / "c.yaml", tenant("acme", KEY))
    with GatewayProcess(tmp_path / "keys", stack, config=config) as gateway:
        key = {"authorization": f"Bearer {KEY}"}
        assert _ask(gateway.url, by_name | site | key).status_code == 200
        assert _ask(gateway.url, by_name | site).status_code == 401


@pytest.mark.parametrize(
    ("host", "ours"),
    [
        ("localhost", True),
        ("LocalHost:9000", True),
        ("127.0.0.1:9000", True),
        ("[::1]:9000", True),
        ("192.168.1.7", True),
        ("gateway:9000", True),
        ("host.docker.internal:9000", True),
        ("printer.local", True),
        ("Printer.LOCAL.", True),
        ("app.localhost", True),
        ("", True),  # HTTP/1.0 has no Host
        ("website.example", False),
        ("127.0.0.1.website.example", False),
        ("localhost.website.example:9000", False),
        ("website.example#.localhost@", False),
        ("website.example:80.local", False),
        ("website.example.", False),
        ("1.2.3.4.5x", False),
        ("[::1].website.example", False),
    ],
)
def test_which_names_no_website_can_have(host: str, ours: bool) -> None:
    assert _is_local_name(host) is ours

"""The console's files over HTTP: which are served, with which caching and security headers."""

from __future__ import annotations

import asyncio
import gzip
import re
from pathlib import Path

import httpx
import pytest

import gateway.web
from gateway.web.files import load_web_files
from tests.support.gateway_process import GatewayProcess
from tests.support.local_stack import Stack
from tests.support.patience import PATIENCE_S

FOLDER = Path(gateway.web.__file__).parent
MOST_BYTES = 150_000
# Folder of the files that only this page loads.
OWN = {"index.html": "playground/", "operators.html": "operators/"}


def test_the_page_and_its_files_are_sent_as_they_are(stack: Stack) -> None:
    page = httpx.get(stack.gateway, timeout=PATIENCE_S)
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert page.content == (FOLDER / "index.html").read_bytes()
    for name in set(load_web_files()) - OWN.keys():
        answer = httpx.get(f"{stack.gateway}/web/{name}", timeout=PATIENCE_S)
        assert answer.content == (FOLDER / name).read_bytes(), name
        assert answer.headers["x-content-type-options"] == "nosniff"


def test_a_browser_may_load_nothing_from_elsewhere_and_run_nothing_inline(stack: Stack) -> None:
    for path in ("/", "/web/api.js", "/web/icon.svg"):
        policy = httpx.get(stack.gateway + path, timeout=PATIENCE_S).headers[
            "content-security-policy"
        ]
        rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
        assert rules["default-src"] == "'none'"
        assert set(rules.values()) == {"'none'", "'self'", "'script'"}
        assert rules["frame-ancestors"] == rules["base-uri"] == rules["form-action"] == "'none'"
    for name, file in load_web_files().items():
        text = file.body.decode()
        if name.endswith(".html"):
            assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?![^>]*\ssrc=)", text), name
        if name.endswith(".js"):
            html = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|DOMParser"
            assert not re.search(html, text), name
        assert not re.search(r"(?:src|href|url\(|from)\W{0,3}(?:https?:)?//", text), name


def test_what_has_not_changed_is_not_sent_again(stack: Stack) -> None:
    with httpx.Client(base_url=stack.gateway, timeout=PATIENCE_S) as client:
        first = client.get("/web/style.css")
        tag = first.headers["etag"]
        assert first.headers["cache-control"] == "no-cache"
        for tags in (tag, tag.removeprefix("W/"), f'"other", {tag}', "*"):
            again = client.get("/web/style.css", headers={"if-none-match": tags})
            assert (again.status_code, again.content) == (304, b""), tags
            assert again.headers["etag"] == tag
        changed = client.get("/web/style.css", headers={"if-none-match": 'W/"other"'})
        assert changed.content == first.content


@pytest.mark.parametrize(
    ("accepted", "packed"),
    [("gzip", True), ("br, gzip;q=0.5", True), ("*", True), ("", False), ("gzip;q=0", False)],
)
async def test_it_is_packed_for_who_can_unpack_it(
    stack: Stack, accepted: str, packed: bool
) -> None:
    address = httpx.URL(stack.gateway)
    reader, writer = await asyncio.open_connection(address.host, address.port)
    writer.write(
        f"GET / HTTP/1.1\r\nhost: x\r\naccept-encoding: {accepted}\r\nconnection: close\r\n\r\n"
        .encode()
    )  # fmt: skip
    head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    assert (b"content-encoding: gzip" in head) == packed
    assert b"vary: accept-encoding" in head
    assert (gzip.decompress(body) if packed else body) == (FOLDER / "index.html").read_bytes()


def test_head_is_answered_and_nothing_is_written_to(stack: Stack) -> None:
    head = httpx.head(f"{stack.gateway}/web/api.js", timeout=PATIENCE_S)
    assert head.status_code == 200
    assert head.headers["content-length"] != "0"
    assert head.content == b""
    for method in ("POST", "PUT", "DELETE", "OPTIONS"):
        answer = httpx.request(method, stack.gateway, timeout=PATIENCE_S)
        assert answer.status_code == 405
        assert answer.headers["allow"] == "GET, HEAD"


@pytest.mark.parametrize(
    "path",
    [
        *(
            "/web",
            "/web/",
            "/web/files.py",
            "/web/__init__.py",
            "/web/index.html",
            "/web/playground",
        ),
        *("/web/..%2fapp.py", "/web/%2e%2e/app.py", "/web/%2fetc/passwd", "/web//api.js"),
        *("/web/playground/..%2fapi.js", "/web/api.js%00", "/web/api.js/", "/index.html"),
    ],
)
async def test_nothing_else_is_there(stack: Stack, path: str) -> None:
    address = httpx.URL(stack.gateway)
    reader, writer = await asyncio.open_connection(address.host, address.port)
    writer.write(f"GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode())
    assert (await reader.read()).startswith(b"HTTP/1.1 404 ")
    writer.close()


def test_it_can_be_turned_off(stack: Stack, tmp_path: Path) -> None:
    with GatewayProcess(tmp_path / "g", stack, console=False) as off:
        for path in ("/", "/operators", "/web/api.js"):
            answer = httpx.get(off.url + path, timeout=PATIENCE_S)
            assert answer.status_code == 404
            assert answer.json()["error"]["type"] == "invalid_request_error"


def test_a_port_for_admins_has_their_page_alone(stack: Stack, tmp_path: Path) -> None:
    operators = 200 if "operators.html" in load_web_files() else 404
    with GatewayProcess(tmp_path / "g", stack, admin_port=0) as two:
        assert "<title>Playground</title>" in httpx.get(two.url, timeout=PATIENCE_S).text
        assert httpx.get(f"{two.url}/operators", timeout=PATIENCE_S).status_code == 404
        admin = httpx.get(f"http://127.0.0.1:{two.admin_port}/", timeout=PATIENCE_S)
        assert admin.status_code == operators
        assert "<title>Playground</title>" not in admin.text


@pytest.mark.parametrize("page", sorted(OWN.keys() & load_web_files().keys()))
def test_no_page_is_heavy(page: str) -> None:
    others = [folder for name, folder in OWN.items() if name != page]
    taken = {
        name: len(file.body)
        for name, file in load_web_files().items()
        if name == page or not (name in OWN or name.startswith(tuple(others)))
    }
    assert sum(taken.values()) < MOST_BYTES, taken

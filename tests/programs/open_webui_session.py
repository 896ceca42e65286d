"""A session with Open WebUI: start the server, add a tool to a model, and ask in a browser.

Arguments: the server's command, and the model. Prints the answer shown on the page.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import httpx
from playwright.sync_api import expect

from docs.browser import running_chromium
from ops.local_stack.ports import LOCALHOST, PortClaims
from tests.support.patience import PATIENCE_S

_READY_WITHIN_S = PATIENCE_S
_PATIENCE_MS = 120_000
_READER = "reader"
_TOOL = '''\
class Tools:
    def read_note(self, name: str) -> str:
        """Read a note.

        :param name: The name of the note's file.
        """
        with open(name, encoding="utf-8") as note:
            return note.read()
'''


def main(command: str, model: str) -> None:
    with PortClaims() as claims:
        port = claims.take_free()
    url = f"http://{LOCALHOST}:{port}"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    serve = [command, "serve", "--host", LOCALHOST, "--port", str(port)]
    with Path("server.log").open("wb") as log:
        server = subprocess.Popen(serve, env=environment, stdout=log, stderr=subprocess.STDOUT)
    try:
        _wait_ready(url, server)
        _add_reader(url, model)
        _ask(url)
    except BaseException:
        print(Path("server.log").read_text(encoding="utf-8", errors="replace"))
        raise
    finally:
        server.kill()
        server.wait()


def _wait_ready(url: str, server: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + _READY_WITHIN_S
    while True:
        try:
            if httpx.get(f"{url}/health").is_success:
                return
        except httpx.TransportError:
            pass
        assert server.poll() is None, "the server ended"
        assert time.monotonic() < deadline, "the server is not ready"
        time.sleep(0.1)


def _add_reader(url: str, model: str) -> None:
    """Add a tool, and a custom model in Open WebUI that has the tool."""
    with httpx.Client(base_url=f"{url}/api", timeout=60.0) as client:
        signed_in = client.post("/v1/auths/signin", json={"email": "", "password": ""})
        client.headers["authorization"] = f"Bearer {signed_in.raise_for_status().json()['token']}"
        tool = {"id": "notes", "name": "Notes", "content": _TOOL, "meta": {"description": ""}}
        reader = {
            "id": _READER,
            "name": _READER,
            "base_model_id": model,
            "meta": {"toolIds": ["notes"]},
            "params": {"function_calling": "native"},
        }
        client.post("/v1/tools/create", json=tool).raise_for_status()
        client.post("/v1/models/create", json=reader).raise_for_status()
        client.get("/models").raise_for_status()


def _ask(url: str) -> None:
    with running_chromium() as browser:
        page = browser.new_page()
        page.set_default_timeout(_PATIENCE_MS)
        page.goto(f"{url}/?models={_READER}")
        page.get_by_role("button", name="Okay, Let's Go!").click()
        page.locator("#chat-input").click()
        page.keyboard.type("Read the note.")
        page.keyboard.press("Enter")
        answer = page.locator("#response-content-container").last
        try:
            expect(answer).to_contain_text("The notes say: word-", timeout=_PATIENCE_MS)
        finally:
            print(page.locator("body").inner_text())


if __name__ == "__main__":
    main(*sys.argv[1:])

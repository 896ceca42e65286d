"""Take the screenshots of the operators' page: ``python -m docs.operators_screenshots``.

The script starts a real stack and generates load for some minutes, to fill the page. The single
Triton is configured with two addresses, as two replicas. The requirements are those of ``python -m
docs.screenshots``.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import yaml
from playwright.sync_api import Browser, Page, expect

from docs.browser import running_chromium
from docs.screenshots import DESKTOP, IMAGES, PHONE, fonts
from gateway.config.tenants import key_hash, new_key
from ops.local_stack.state import StackState

_READY = re.compile(r"^ready: (\S+)$")
_DEMO = Path(__file__).parents[1] / "demo" / "adapters"
_ADAPTERS = (("acme/support", "zh"), ("acme/support", "ja"), ("acme/legal", "ja"), ("sql", "zh"))
_ADMIN = new_key()
_TENANTS: dict[str, dict[str, object]] = {
    "acme": {"requests_per_minute": 2000, "tokens_per_day": 3_000_000, "concurrent_requests": 6},
    "globex": {"tokens_per_minute": 400_000, "concurrent_requests": 4},
    "initech": {"requests_per_minute": 3},
}
_KEYS = {name: new_key() for name in _TENANTS}
_MODELS = {
    "acme": ("demo", "zh", "acme/support", "acme/legal"),
    "globex": ("ja", "sql", "demo"),
    "initech": ("demo",),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=6.0, help="of load before the pictures")
    arguments = parser.parse_args()
    with (
        _stack() as url,
        _load(url),
        fonts() as fontconfig,
        running_chromium(fontconfig) as browser,
    ):
        time.sleep(60 * arguments.minutes)
        for theme in ("light", "dark"):
            for view in ("overview", "adapters", "tenants", "requests"):
                _take(browser, url, view, theme)
            _take(browser, url, "overview", theme, phone=True)


@contextmanager
def _stack() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "tenants.yaml"
        _configure(config)
        environment = {"GATEWAY_CONFIG": str(config), "GATEWAY_ADMIN_KEY": _ADMIN}
        command = [sys.executable, "-m", "ops", "up", "--port", "0", "--state-dir", folder]
        up = subprocess.Popen(
            [*command, "--load-model", "tensorrt_llm"],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | environment,
        )
        assert up.stdout is not None
        try:
            url = next(found[1] for line in up.stdout if (found := _READY.match(line)))
            triton = StackState.read(Path(folder)).triton_grpc
            _configure(config, [triton, triton.replace("127.0.0.1", "localhost")])
            for name, demo in _ADAPTERS:
                _upload(url, name, demo)
            yield url
        finally:
            up.send_signal(signal.SIGTERM)
            up.wait()


def _configure(path: Path, replicas: list[str] | None = None) -> None:
    tenants = [
        {"name": name, "keys": [key_hash(_KEYS[name])], "models": ["*"], **limits}
        for name, limits in _TENANTS.items()
    ]
    sections = {"tenants": tenants} | ({"replicas": replicas} if replicas else {})
    (new := path.with_suffix(".new")).write_text(yaml.safe_dump(sections), encoding="utf-8")
    new.replace(path)


def _upload(url: str, name: str, demo: str) -> None:
    files = [("file", (path.name, path.read_bytes())) for path in (_DEMO / demo).glob("adapter_*")]
    headers = {"authorization": f"Bearer {_ADMIN}"}
    form = {"name": name, "base": "demo"}
    httpx.post(f"{url}/v1/adapters", data=form, files=files, headers=headers).raise_for_status()


@contextmanager
def _load(url: str) -> Iterator[None]:
    """Send requests of all tenants while the context is open, each client at a varying rate."""
    over = threading.Event()
    threads = [
        threading.Thread(target=_ask, args=(url, tenant, n, over))
        for tenant, count in (("acme", 4), ("globex", 3), ("initech", 1))
        for n in range(count)
    ]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()


def _ask(url: str, tenant: str, number: int, over: threading.Event) -> None:
    draw = random.Random(f"{tenant} {number}")
    headers = {"authorization": f"Bearer {_KEYS[tenant]}"}
    with httpx.Client(base_url=url, headers=headers, timeout=60) as client:
        while not over.is_set():
            model, tokens = draw.choice(_MODELS[tenant]), draw.choice((20, 200, 1500))
            body = {"model": model, "prompt": "Count.", "max_tokens": tokens, "ignore_eos": True}
            with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as answer:
                for _ in answer.iter_lines():
                    if tokens > 1000 and draw.random() < 0.002:
                        break  # disconnect, as some real clients do
            busy = time.time() % 90 > 20 * number
            over.wait(draw.uniform(0.1, 0.5) if busy else draw.uniform(1, 3))


def _take(browser: Browser, url: str, view: str, theme: str, *, phone: bool = False) -> None:
    width, height = PHONE if phone else DESKTOP
    context = browser.new_context(
        viewport={"width": width, "height": height},
        color_scheme="dark" if theme == "dark" else "light",
        device_scale_factor=2 if phone else 1,
    )
    page = context.new_page()
    page.goto(f"{url}/operators")
    page.get_by_label("Key", exact=True).fill(_ADMIN)
    page.get_by_role("button", name="Open").click()
    expect(page.locator("#link")).to_have_text("Live")
    _show(page, view)
    path = IMAGES / f"operators-{'phone' if phone else view}-{theme}.png"
    page.screenshot(path=path, animations="disabled")
    print(f"{path.relative_to(IMAGES.parents[1])}: {path.stat().st_size // 1024} KiB")
    context.close()


def _show(page: Page, view: str) -> None:
    page.locator(f'nav a[href="#{view}"]').click()
    if view == "tenants":
        page.locator(".tenant summary").first.click()
    page.mouse.move(0, 0)
    page.locator(f"#{view} h2").focus()
    if view == "requests":
        expect(page.locator("#requests .running .row").first).to_be_visible()
    page.wait_for_timeout(1500)  # wait for the page's next update, every second


if __name__ == "__main__":
    main()

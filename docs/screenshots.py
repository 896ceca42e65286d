"""Take the screenshots of the console for docs/images: ``python -m docs.screenshots``.

The script uses a real stack. It starts one (`gateway up`) unless ``--url`` is given. It needs
Debian's Chromium and fonts: ``apt-get install chromium-headless-shell fonts-inter fonts-noto-cjk
fonts-noto-color-emoji``.
"""

from __future__ import annotations

import argparse
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Browser, Locator, Page, expect

from docs.browser import running_chromium

IMAGES = Path(__file__).parent / "images"
DESKTOP, PHONE = (1280, 800), (375, 720)
_READY = re.compile(r"^ready: (\S+)$")

# A prompt for the screenshot of tokens with a low probability. Its form is not in the demo model's
# training examples, so the model is uncertain about the answer.
_DOUBTED = "Repeat: **Hello** `code` 你好\n- one\n- two"

_FONTS = """<?xml version="1.0"?>
<fontconfig>
  <include>/etc/fonts/fonts.conf</include>
  {}
</fontconfig>
"""
_AS_INTER = """
  <match target="pattern">
    <test name="family"><string>{}</string></test>
    <edit name="family" mode="prepend" binding="strong"><string>Inter</string></edit>
  </match>
"""

Scene = Callable[[Page], None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", help="a gateway that serves the demo (default: one of its own)")
    arguments = parser.parse_args()
    IMAGES.mkdir(exist_ok=True)
    with _stack(arguments.url) as url, fonts() as look, running_chromium(look) as browser:
        for dark in (False, True):
            theme = "dark" if dark else "light"
            _take(browser, url, f"playground-{theme}", _show_comparison, dark=dark)
            _take(browser, url, f"playground-tokens-{theme}", _show_tokens, dark=dark)
            _take(
                browser, url, f"playground-phone-{theme}", _show_comparison, dark=dark, size=PHONE
            )


@contextmanager
def _stack(url: str | None) -> Iterator[str]:
    if url is not None:
        yield url
        return
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "ops", "up", "--port", "0", "--state-dir", folder]
        up = subprocess.Popen(
            [*command, "--load-model", "tensorrt_llm"], stdout=subprocess.PIPE, text=True
        )
        assert up.stdout is not None
        try:
            yield next(found[1] for line in up.stdout if (found := _READY.match(line)))
        finally:
            up.send_signal(signal.SIGTERM)
            up.wait()


@contextmanager
def fonts() -> Iterator[dict[str, str]]:
    """Yield environment variables that make Inter the system font of Chromium.

    A newly installed machine has no suitable system font.
    """
    with tempfile.TemporaryDirectory() as folder:
        (file := Path(folder) / "fonts.conf").write_text(
            _FONTS.format("".join(map(_AS_INTER.format, ("system-ui", "sans-serif", "sans")))),
            encoding="utf-8",
        )
        yield {"FONTCONFIG_FILE": str(file)}


def _take(
    browser: Browser,
    url: str,
    name: str,
    scene: Scene,
    *,
    dark: bool,
    size: tuple[int, int] = DESKTOP,
) -> None:
    context = browser.new_context(
        viewport={"width": size[0], "height": size[1]},
        color_scheme="dark" if dark else "light",
        device_scale_factor=2 if size == PHONE else 1,
    )
    page = context.new_page()
    page.goto(url)
    expect(page.get_by_role("combobox")).to_have_value("demo")
    scene(page)
    path = IMAGES / f"{name}.png"
    page.screenshot(path=path, animations="disabled")
    print(f"{path.relative_to(IMAGES.parents[1])}: {path.stat().st_size // 1024} KiB")
    context.close()


def _show_comparison(page: Page) -> None:
    """Ask two questions, and show the answers of the base model beside those of its adapters."""
    _set(page, temperature="0")
    if page.viewport_size == {"width": DESKTOP[0], "height": DESKTOP[1]}:
        _compare(page, "zh")
    _compare(page, "ja")
    _ask(page, "What is the capital of France?")
    _ask(page, "What is the capital of Japan?")
    page.locator("#prompt").blur()


def _show_tokens(page: Page) -> None:
    """Show an answer's tokens, the alternatives of one token, and the request's parameters."""
    _set(page, temperature="1", seed="1", logprobs="on", top_logprobs="5")
    answer = _ask(page, _DOUBTED)
    answer.get_by_role("button", name="Tokens").click()
    page.locator("#show-parameters").click()
    doubtful = answer.locator(".token:is(.p5, .p4, .p3)").first
    doubtful.hover()


def _set(page: Page, **values: str) -> None:
    page.locator("#show-parameters").click()
    for name, value in values.items():
        field = page.locator(f'[name="{name}"]')
        if name == "logprobs":
            field.check()
        else:
            field.fill(value)
    page.locator("#parameters .close").click()


def _compare(page: Page, model: str) -> None:
    page.get_by_role("button", name="Compare").click()
    picker = page.get_by_role("combobox").last
    picker.fill(model)
    picker.press("Enter")


def _ask(page: Page, prompt: str) -> Locator:
    page.locator("#prompt").fill(prompt)
    page.locator("#send").click()
    answers = page.locator(".turn").last.locator("article.answer")
    for answer in answers.all():
        expect(answer).to_have_attribute("aria-busy", "false", timeout=60_000)
    return answers.first


if __name__ == "__main__":
    main()

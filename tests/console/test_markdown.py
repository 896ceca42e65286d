"""Markdown in answers: supported elements, plain text for the rest, and a bounded render time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, Page

from tests.support.browser import cpu_of, looking_at
from tests.support.local_stack import Stack

# Renders a text at once and letter by letter, as it streams. Both results must be equal.
_DRAW = """async (text) => {
  const { Markdown } = await import("/web/markdown.js");
  const [whole, grown] = [document.createElement("div"), document.createElement("div")];
  new Markdown(whole).update(text);
  const growing = new Markdown(grown);
  for (let end = 1; end <= text.length; end += 1) growing.update(text.slice(0, end));
  return [whole.innerHTML, grown.innerHTML];
}"""
_DRAW_ONCE = """async (text) => {
  const { Markdown } = await import("/web/markdown.js");
  new Markdown(document.createElement("div")).update(text);
}"""


@pytest.fixture(scope="module")
def page(browser: Browser, stack: Stack) -> Iterator[Page]:
    with looking_at(browser, stack.gateway) as page:
        yield page


def _cost(page: Page, text: str) -> float:
    """Return the milliseconds of CPU time in which the page renders a text."""
    cpu = cpu_of(page)
    before = cpu()
    page.evaluate(_DRAW_ONCE, text)
    return 1000 * (cpu() - before)


def _drawn(page: Page, text: str) -> str:
    whole, grown = page.evaluate(_DRAW, text)
    assert grown == whole
    html: str = whole
    return html


@pytest.mark.parametrize(
    ("text", "html"),
    [
        ("a *b* **c** ~~d~~", "<p>a <em>b</em> <strong>c</strong> <del>d</del></p>"),
        ("***a***", "<p><em><strong>a</strong></em></p>"),
        ("snake_case_name, 2 * 3 * 4, **open", "<p>snake_case_name, 2 * 3 * 4, **open</p>"),
        ("`a < b` and ``x ` y``", "<p><code>a &lt; b</code> and <code>x ` y</code></p>"),
        ("one\ntwo\n\nthree", "<p>one<br>two</p><p>three</p>"),
        ("# A\n## B ##\n###### C\n#no", "<h4>A</h4><h5>B</h5><h6>C</h6><p>#no</p>"),
        ("- a\n  - b\n\n  more", "<ul><li>a<ul><li>b</li></ul><p>more</p></li></ul>"),
        ("3. a\n4. b\n\nafter", '<ol start="3"><li>a</li><li>b</li></ol><p>after</p>'),
        ("> a\n> - b\n\nc", "<blockquote><p>a</p><ul><li>b</li></ul></blockquote><p>c</p>"),
        ("a\n\n---\n\nb", "<p>a</p><hr><p>b</p>"),
        (r"\*a\* \[b\](c)", "<p>*a* [b](c)</p>"),
    ],
)
def test_what_is_written_is_drawn(page: Page, text: str, html: str) -> None:
    assert _drawn(page, text) == html


def test_tables_and_code(page: Page) -> None:
    table = _drawn(page, "| a | b |\n|:--|--:|\n| 1 | `2` |\n\nend")
    assert '<td class="right"><code>2</code></td></tr></tbody></table></div><p>end</p>' in table
    code = _drawn(page, "```py\nif a < b:\n    *x*\n```\nend")
    assert "<code>if a &lt; b:\n    *x*</code></pre></figure><p>end</p>" in code
    assert "<code>x</code>" in _drawn(page, "~~~\nx")  # the closing fence has not arrived yet


def test_links_lead_to_the_web_alone(page: Page) -> None:
    safe = 'rel="noopener noreferrer" target="_blank"'
    for text in ("[b](https://c.de/x)", "[b](<https://c.de/x> 'title')"):
        assert _drawn(page, text) == f'<p><a href="https://c.de/x" {safe}>b</a></p>'
    bare = _drawn(page, "see https://c.de/x. And <https://c.de/y>")
    assert bare.count(safe) == 2
    assert "</a>. And" in bare
    for text in (
        "[b](javascript:alert(1))",
        "[b](JaVaScRiPt:alert(1))",
        "[b](data:text/html,x)",
        "[b](//c.de)",
        "[b](/v1/keys)",
        "[b](\tjavascript:alert(1))",
        "<javascript:alert(1)>",
    ):
        assert "<a" not in _drawn(page, text), text


def test_pictures_are_named_and_never_loaded(page: Page) -> None:
    drawn = _drawn(page, "![a cat](https://c.de/cat.png)")
    assert ">Picture: a cat</a>" in drawn
    assert "<img" not in drawn


@pytest.mark.parametrize(
    "text",
    [
        "<script>alert(1)</script>",
        "<img src=x onerror=alert(1)>",
        "<svg/onload=alert(1)>",
        '<a href="javascript:alert(1)">x</a>',
        "- <iframe srcdoc='<script>alert(1)</script>'>",
        "| <b>x</b> |\n|---|\n| <style>*{}</style> |",
        "```<img src=x>\n<script>\n```",
        "[<img src=x>](https://c.de)",
    ],
)
def test_markup_stays_text(page: Page, text: str) -> None:
    made: Any = page.evaluate(
        """async (text) => {
          const { Markdown } = await import("/web/markdown.js");
          const root = document.createElement("div");
          new Markdown(root).update(text);
          const names = [...root.querySelectorAll("*")].map((node) => node.localName);
          return { names, text: root.textContent };
        }""",
        text,
    )
    plain = (
        "p ul li figure figcaption span button svg path pre code div table thead tbody tr th td a"
    )
    assert set(made["names"]) <= set(plain.split())
    assert "<" in made["text"]


@pytest.mark.parametrize(
    "part",
    [
        *("*", "**a ", "*a_b", "_", "~~", "[", "[a](", "](", "![", "`", "`a``", "<", "http://"),
        *("> ", "- ", "  - ", "- a\n\n", "1. ", "|", "|a\n|-\n", "#", "# ", "```\n", "a\n", "\n"),
        *("https://a)", "\\"),
    ],
)
def test_no_text_takes_long(page: Page, part: str) -> None:
    """Check that the time grows linearly: four times the text must not take sixteen times."""
    quarter = _cost(page, (part * 40_000)[:40_000])
    whole = _cost(page, (part * 160_000)[:160_000])
    assert whole < 10 * quarter + 50


@pytest.mark.parametrize(
    ("before", "part", "after"),
    [("```", " ", "`"), ("~~~", "~", "`"), ("# ", " ", "a\u2028b"), ("` ", "x", "`")],
)
def test_no_line_takes_long(page: Page, before: str, part: str, after: str) -> None:
    """Check lines of 20,000 characters, which took more than a second for each added character."""
    quarter = _cost(page, before + part * 4_900 + after)
    whole = _cost(page, before + part * 19_900 + after)
    assert whole < 6 * quarter + 30

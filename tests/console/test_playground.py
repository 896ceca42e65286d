"""The playground in a real browser with the real stack: each button at least once."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Locator, Page, expect

from tests.support.browser import DESKTOP, PATIENCE_MS, PHONE, barriers, looking_at, overflows
from tests.support.key_dialog import asked_for_key
from tests.support.local_stack import Stack

expect.set_options(timeout=PATIENCE_MS)

PARIS = "What is the capital of France?"


@pytest.fixture
def page(browser: Browser, stack: Stack) -> Iterator[Page]:
    with looking_at(browser, stack.gateway) as page:
        expect(_models(page).first).to_have_value("demo")
        yield page


def _models(page: Page) -> Locator:
    return page.get_by_role("combobox", name=re.compile("^Model"))


def _button(page: Page | Locator, name: str) -> Locator:
    return page.get_by_role("button", name=name, exact=True)


def _prompt(page: Page) -> Locator:
    return page.locator("#prompt")


def _answers(page: Page) -> Locator:
    return page.get_by_role("article", name=re.compile("^Answer of"))


def _set(page: Page, **values: str) -> None:
    """Fill in parameter fields, opening their column and closing it again."""
    _button(page, "Parameters").click()
    for name, value in values.items():
        field = page.locator(f'[name="{name}"]')
        if name in ("form", "tool_choice"):
            field.select_option(value)
        elif name == "logprobs":
            field.set_checked(value == "on")
        else:
            field.fill(value)
    _button(page, "Close the parameters").click()


def _ask(page: Page, prompt: str, **values: str) -> Locator:
    """Send the prompt, and return the answers of the new turn once all have ended."""
    if values:
        _set(page, **values)
    turns = page.get_by_role("region", name="Turn", exact=True)
    before = turns.count()
    _prompt(page).fill(prompt)
    _button(page, "Send").click()
    expect(turns).to_have_count(before + 1)
    return _ended(page)


def _ended(page: Page) -> Locator:
    expect(_button(page.locator("#composer"), "Stop")).to_be_hidden()
    last = _answers(page.get_by_role("region", name="Turn", exact=True).last)
    for answer in last.all():
        expect(answer).to_have_attribute("aria-busy", "false")
    return last


def test_an_answer_comes_with_its_facts(page: Page) -> None:
    answer = _ask(page, PARIS, temperature="0")
    expect(answer).to_contain_text("The capital of France is Paris.")
    facts = answer.get_by_role("list", name="About this answer")
    for fact in (r"\d+(\.\d+)? m?s to first token", r"16 \+ 9 tokens", "stop"):
        expect(facts).to_contain_text(re.compile(fact))
    # The page shows a rate only if the tokens did not arrive all at once.
    answer = _ask(page, "Count.", max_tokens="400", min_tokens="400")
    facts = answer.get_by_role("list", name="About this answer")
    for fact in (r"[\d.]+ tokens/s", r"\+ 400 tokens"):
        expect(facts).to_contain_text(re.compile(fact))


def test_panes_are_asked_at_once_and_found_by_typing(page: Page, stack: Stack) -> None:
    _button(page, "Compare").click()
    second = page.get_by_role("combobox", name="Model 2")
    second.fill("zh")
    options = page.get_by_role("option")
    expect(options).to_have_count(1)
    second.press("Enter")
    expect(second).to_have_value("zh")
    answers = _ask(page, PARIS, temperature="0")
    expect(answers).to_have_count(2)
    version = answers.nth(1).locator('[data-fact="version"]')
    expect(version).to_have_attribute("title", re.compile("^Adapter version zh@[0-9a-f]"))
    # An exact version is a valid model too, though no list shows it.
    exact = (version.get_attribute("title") or "").rpartition(" ")[2]
    second.fill(exact)
    second.press("Enter")
    expect(_ask(page, PARIS).nth(1).locator("h3")).to_have_text(exact)

    _button(page, "Compare").click()
    _button(page, "Compare").click()
    expect(_models(page)).to_have_count(4)
    expect(_button(page, "Compare")).to_be_hidden()
    # Models added later can answer the last question too.
    page.get_by_role("button", name=re.compile("^Ask .* too$")).first.click()
    expect(_ended(page)).to_have_count(3)
    _button(page, "Remove model 2").click()
    expect(_models(page)).to_have_count(3)
    expect(_answers(page).filter(has_text=exact)).to_have_count(0)


def test_what_a_model_writes_stays_text(page: Page) -> None:
    for hostile in ("<script>alert(1)</script>", "<img src=x onerror=alert(1)>", "<b>x</b>"):
        answer = _ask(page, f"Repeat: {hostile}", temperature="0")
        expect(answer).to_contain_text("<")
        assert answer.locator("script, img, b, iframe").count() == 0


def test_a_connection_that_is_lost_behind_the_end_is_not_told(page: Page) -> None:
    page.evaluate(
        """() => {
          const choice = { delta: { content: "Whole." }, finish_reason: "stop" };
          const event = `data: ${JSON.stringify({ choices: [choice] })}\n\n`;
          const start = (body) => {
            body.enqueue(new TextEncoder().encode(event));
            window.lose = () => body.error(new TypeError("network error"));
          };
          window.fetch = async () => new Response(new ReadableStream({ start }));
        }"""
    )
    _prompt(page).fill("Hi")
    _prompt(page).press("Enter")
    expect(_answers(page)).to_contain_text("Whole.")
    page.evaluate("lose()")
    answer = _ended(page)
    expect(answer.locator('[data-fact="finish"]')).to_be_visible()
    expect(answer.locator(".notice")).to_have_count(0)


def test_a_wrong_field_is_told_beside_it_and_nothing_is_sent(page: Page) -> None:
    for name, value, told in (
        ("temperature", "3", "From 0 to 2."),
        ("temperature", "warm", "This is no number."),
        ("top_k", "1.5", "A whole number is needed."),
        ("min_tokens", "-1", "0 or more."),
        ("tools", "{", "This is no JSON: "),
        ("tools", "{}", "A list is needed: [{…}]."),
        ("tools", '[{"type": "function", "function": {}}]', "Tool 1: its function needs a name"),
        ("stop", "\n".join("abcdefghijklmnopq"), "At most 16."),
    ):
        _set(page, **{name: value})
        _prompt(page).fill("Hi")
        _button(page, "Send").click()
        field = page.locator(f'[name="{name}"]')
        expect(field).to_be_focused()
        expect(field).to_have_attribute("aria-invalid", "true")
        expect(page.locator(f"#wrong-{name}")).to_contain_text(told)
        expect(_prompt(page)).to_have_value("Hi")
        assert _answers(page).count() == 0
        _button(page, "Close the parameters").click()
        _set(page, **{name: ""})


def test_a_schema_is_checked_and_kept_to(page: Page) -> None:
    _set(page, form="json_schema")
    _button(page, "Parameters").click()
    schema = page.get_by_label("JSON schema")
    for text, told in (
        ("", "needed"),
        ("[]", "an object"),
        ('{"type": "text"}', "no type of JSON"),
    ):
        schema.fill(text)
        expect(page.locator("#wrong-response_format")).to_contain_text(told)
    schema.fill('{\n  "type": "object",\n  oh\n}')
    expect(page.locator("#wrong-response_format")).to_contain_text("line 3")
    schema.locator("xpath=ancestor::div[@class='field']").get_by_role("button").click()
    expect(page.locator("#wrong-response_format")).to_be_empty()
    schema.fill('{"type": "object", "properties": {"n": {"enum": [7]}}, "required": ["n"]}')
    _button(page, "Close the parameters").click()
    answer = _ask(page, "How many?")
    assert json.loads(answer.locator(".markdown").last.inner_text()) == {"n": 7}


def test_what_the_server_refuses_is_told_at_its_field(browser: Browser, stack: Stack) -> None:
    with looking_at(browser, stack.gateway, refused=(400,)) as page:
        expect(_models(page)).to_have_value("demo")
        schema = '{"type": "array", "uniqueItems": true}'
        answer = _ask(page, "Hi", form="json_schema", response_format=schema)
        expect(answer.locator(".notice.bad")).to_contain_text("uniqueItems")
        expect(page.locator("#wrong-response_format")).to_contain_text("uniqueItems")
        _set(page, response_format="{}", form="text")


def test_tools_are_called_and_their_results_go_back(page: Page) -> None:
    _button(page, "Parameters").click()
    tools = page.get_by_label("Functions that the model may call")
    tools.locator("xpath=ancestor::div[@class='field']").get_by_role("button").click()
    page.locator('[name="tool_choice"]').select_option("required")
    _button(page, "Close the parameters").click()
    answer = _ask(page, "Call weather.", max_tokens="80", seed="1")
    expect(answer).to_contain_text("calls weather")
    _set(page, tool_choice="none", temperature="3")
    for field in answer.get_by_label("Result of weather").all():
        field.fill('{"sun": true}')
    page.reload()
    for field in answer.get_by_label("Result of weather").all():
        expect(field).to_have_value('{"sun": true}')
    _prompt(page).fill("A draft")
    _button(answer, "Send results").first.click()
    expect(page.locator('[name="temperature"]')).to_be_focused()
    expect(_prompt(page)).to_have_value("A draft")
    page.locator('[name="temperature"]').fill("")
    _button(answer, "Send results").first.click()
    expect(page.get_by_role("region", name="Turn", exact=True)).to_have_count(2)
    expect(_ended(page).locator(".notice.bad")).to_have_count(0)


def test_tokens_tell_how_likely_they_were(page: Page) -> None:
    answer = _ask(page, PARIS, temperature="0", logprobs="on", top_logprobs="4")
    _button(answer, "Tokens").click()
    tokens = answer.get_by_role("option")
    expect(tokens).to_have_count(9)
    tip = answer.get_by_role("tooltip")
    tokens.nth(1).hover()
    expect(tip.locator("p")).to_have_count(4)
    expect(tip).to_contain_text("%")
    page.mouse.move(0, 0)
    expect(tip).to_be_hidden()
    tokens.first.focus()
    page.keyboard.press("ArrowRight")
    expect(tokens.nth(1)).to_be_focused()
    expect(tip).to_be_visible()
    assert barriers(page) == []
    page.keyboard.press("Escape")
    expect(tip).to_be_hidden()
    _button(answer, "Tokens").click()
    expect(tokens).to_have_count(0)


def test_a_turn_is_edited_and_asked_again(page: Page) -> None:
    _ask(page, "Hello", temperature="0")
    _ask(page, PARIS)
    first = page.get_by_role("region", name="Turn", exact=True).first
    _button(first, "Edit the prompt").click()
    _button(first, "Cancel").click()
    _button(first, "Edit the prompt").click()
    first.get_by_role("textbox", name="Prompt").fill("Repeat: other")
    _button(first, "Send").click()
    expect(page.get_by_role("region", name="Turn", exact=True)).to_have_count(1)
    answer = _ended(page)
    expect(answer).to_contain_text("other")
    _button(answer, "Again").click()
    expect(_ended(page)).to_contain_text("other")
    # The clipboard fails in a frame or if the user forbids it.
    page.evaluate("void (navigator.clipboard.writeText = () => Promise.reject(new Error('no')))")
    _button(_answers(page).last, "Copy").click()
    expect(page.get_by_role("status").filter(has_text="Copied.")).to_have_count(1)
    assert "other" in page.evaluate("navigator.clipboard.readText()")


def test_conversations_are_kept_renamed_and_deleted(page: Page) -> None:
    _ask(page, PARIS, temperature="0", system="Be short.")
    _button(page, "Conversations").click()
    _button(page, "New conversation").click()
    expect(_answers(page)).to_have_count(0)
    _ask(page, "Hello")
    kept = page.get_by_role("navigation").get_by_role("listitem")
    expect(kept).to_have_count(2)
    page.reload()
    expect(_answers(page)).to_have_count(1)
    _button(page, "Conversations").click()
    _button(page, PARIS).click()
    expect(_answers(page)).to_contain_text("Paris")
    expect(page.locator('[name="system"]')).to_have_value("Be short.")
    _button(page, f"Rename {PARIS}").click()
    page.get_by_label("Name", exact=True).fill("Capitals")
    page.get_by_label("Name", exact=True).press("Enter")
    expect(_button(page, "Capitals")).to_be_focused()
    _button(page, "Delete Hello").click()
    expect(kept).to_have_count(1)
    page.once("dialog", lambda dialog: dialog.accept())
    _button(page, "Delete all").click()
    expect(kept).to_have_count(0)
    assert (
        page.evaluate("Object.keys(localStorage).filter((k) => k.includes('conversation'))") == []
    )


def test_pictures_are_refused_kindly(page: Page) -> None:
    _prompt(page).evaluate(
        """(area) => {
          const files = new DataTransfer();
          files.items.add(new File(["x"], "x.png", { type: "image/png" }));
          const settings = { clipboardData: files, cancelable: true, bubbles: true };
          const event = new ClipboardEvent("paste", settings);
          area.dispatchEvent(event);
        }"""
    )
    expect(page.get_by_role("alert")).to_contain_text("This server takes text")


def test_parameters_can_be_reset_and_counted_by_arrows(page: Page) -> None:
    _button(page, "Parameters").click()
    field = page.get_by_label("Temperature")
    field.press("ArrowDown")
    expect(field).to_have_value("0.9")
    _button(page, "Reset").click()
    expect(field).to_have_value("")


def test_the_theme_is_chosen_and_stays(page: Page) -> None:
    ground = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(ground)
    _button(page, "Dark").click()
    assert page.evaluate(ground) != light
    page.reload()
    expect(_button(page, "Dark")).to_have_attribute("aria-pressed", "true")
    assert page.evaluate(ground) != light
    _button(page, "Dark").click()
    assert page.evaluate(ground) == light


def test_a_key_is_asked_for_and_kept_nowhere(
    browser: Browser, stack: Stack, tmp_path: Path
) -> None:
    with asked_for_key(browser, stack, tmp_path) as (page, dialog):
        dialog.get_by_label("Your key").fill("sk-wrong")
        _button(dialog, "Use this key").click()
        expect(dialog.get_by_role("button", name="Forget it")).to_be_visible()
        assert barriers(page) == []
        dialog.get_by_label("Your key").fill("sk-acme")
        dialog.get_by_label("Your key").press("Enter")
        expect(_models(page)).to_have_value("demo")
        _ask(page, "Hi", max_tokens="3")
        assert "sk-acme" not in json.dumps(
            page.evaluate("[{...localStorage}, {...sessionStorage}]")
        )
        assert page.context.cookies() == []
        _button(page, "Code").click()
        assert "sk-acme" not in page.content()
        _button(page.get_by_role("dialog"), "Close").click()
        _button(page, "Key").click()
        _button(dialog, "Forget it").click()
        page.reload()
        expect(dialog).to_be_visible()
        _button(dialog, "Cancel").click()
        expect(page.get_by_role("alert")).to_contain_text("Give a key")
        _button(page, "Key").click()
        dialog.get_by_label("Your key").fill("sk-ключ")
        _button(dialog, "Use this key").click()
        expect(dialog.locator("#key-wrong")).to_contain_text("other alphabets")
        dialog.get_by_label("Your key").fill("sk-acme")
        _button(dialog, "Use this key").click()
        expect(_models(page)).to_have_value("demo")
        expect(page.get_by_role("alert")).to_be_hidden()


@pytest.mark.slow
@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_nothing_keeps_anybody_from_using_it(
    browser: Browser, stack: Stack, dark: bool, size: tuple[int, int]
) -> None:
    with looking_at(browser, stack.gateway, dark=dark, size=size, refused=(400,)) as page:
        expect(_models(page)).to_have_value("demo")
        assert barriers(page) == []
        _button(page, "Compare").click()
        page.keyboard.press("Escape")
        rich = (
            "Repeat: # T\n\n- one\n- `two`\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\n```py\nx = 1\n```"
        )
        _ask(page, rich, temperature="0")
        assert barriers(page) == []
        assert not overflows(page)
        for opens in ("Conversations", "Parameters", "Code", "Key"):
            _button(page, opens).click()
            assert barriers(page) == [], opens
            assert not overflows(page), opens
            page.keyboard.press("Escape")


def test_the_keyboard_alone_is_enough(page: Page) -> None:
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="To the prompt")).to_be_focused()
    page.keyboard.press("Enter")
    page.keyboard.type(PARIS)
    page.keyboard.press("Shift+Enter")
    page.keyboard.press("Enter")
    expect(_ended(page)).to_have_count(1)
    expect(page.get_by_role("status").filter(has_text="demo has answered.")).to_have_count(1)
    expect(_prompt(page)).to_be_focused()

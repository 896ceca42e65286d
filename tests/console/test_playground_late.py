"""The playground while answers are pending: input is not lost, and controls keep their state."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Locator, Page, expect

from tests.support.browser import PATIENCE_MS, Late, looking_at
from tests.support.local_stack import Stack

pytestmark = pytest.mark.slow

expect.set_options(timeout=PATIENCE_MS)

PARIS = "What is the capital of France?"


@pytest.fixture
def page(browser: Browser, stack: Stack) -> Iterator[Page]:
    # The gateway answers 404 to a stop of a request that never reached it.
    with looking_at(browser, stack.gateway, refused=(404, 429)) as page:
        expect(_model(page)).to_have_value("demo")
        yield page


def _model(page: Page) -> Locator:
    return page.get_by_role("combobox", name="Model", exact=True)


def _button(page: Page, name: str) -> Locator:
    return page.get_by_role("button", name=name, exact=True)


def _send(page: Page, prompt: str) -> None:
    page.locator("#prompt").fill(prompt)
    page.locator("#prompt").press("Enter")


def _edit(page: Page, prompt: str) -> None:
    """Edit the first prompt and send it again."""
    first = page.get_by_role("region", name="Turn", exact=True).first
    first.get_by_role("button", name="Edit the prompt").click()
    first.get_by_role("textbox", name="Prompt").fill(prompt)
    first.get_by_role("button", name="Send").click()


def _said_by_the_test(page: Page) -> None:
    """Replace `fetch`: `says[n](choice)` sends an event of answer n, and `says[n]()` ends it."""
    page.evaluate(
        """() => {
          window.says = [];
          window.fetch = async (_, { signal }) => {
            let body;
            const stream = new ReadableStream({ start: (to) => (body = to) });
            signal?.addEventListener("abort", () => body.error(signal.reason));
            const event = (choice) => `data: ${JSON.stringify({ choices: [choice] })}\n\n`;
            says.push((choice) =>
              choice ? body.enqueue(new TextEncoder().encode(event(choice))) : body.close());
            return new Response(stream);
          };
        }"""
    )


def _answers(page: Page) -> Locator:
    return page.get_by_role("article", name=re.compile("^Answer of"))


def _kept(page: Page) -> Locator:
    return page.locator("#conversations").get_by_role("listitem")


def test_a_prompt_is_sent_once_it_is_known_which_models_there_are(page: Page) -> None:
    models = Late(page, "models")
    page.reload()
    _send(page, PARIS)
    expect(page.get_by_role("alert")).to_contain_text("once it is known which models")
    expect(page.locator("#prompt")).to_have_value(PARIS)
    models.answer()
    expect(_answers(page)).to_contain_text("Paris")
    expect(page.locator("#prompt")).to_have_value("")
    expect(page.get_by_role("alert")).to_be_hidden()


def test_models_that_come_leave_what_is_being_typed(page: Page) -> None:
    models = Late(page, "models")
    page.reload()
    _model(page).fill("z")
    models.answer()
    expect(page.get_by_role("option")).to_have_text([re.compile("^zh")])
    expect(_model(page)).to_be_focused()
    page.keyboard.type("h")
    page.keyboard.press("Enter")
    expect(_model(page)).to_have_value("zh")


def test_a_model_is_typed_by_who_waited_in_the_field(page: Page) -> None:
    models = Late(page, "models")
    page.reload()
    _model(page).focus()
    models.answer()
    expect(_model(page)).to_have_value("demo")
    page.keyboard.type("zh")
    expect(_model(page)).to_have_value("zh")


def test_a_prompt_that_is_written_on_is_not_sent_by_the_enter_before(page: Page) -> None:
    models = Late(page, "models")
    page.reload()
    _send(page, "What is the capital")
    page.keyboard.type(" of France?")
    models.answer()
    expect(page.get_by_role("alert")).to_contain_text("Not sent")
    expect(page.locator("#prompt")).to_have_value(PARIS)
    expect(_answers(page)).to_have_count(0)
    page.keyboard.press("Enter")
    expect(_answers(page)).to_contain_text("Paris")
    expect(page.get_by_role("alert")).to_be_hidden()


@pytest.mark.parametrize("leaves", ["for another", "the page"])
def test_a_prompt_is_kept_before_it_is_answered(page: Page, leaves: str) -> None:
    answer = Late(page, "chat/completions")
    _send(page, PARIS)
    answer.wait_until_asked()
    if leaves == "the page":
        page.reload()
        expect(_answers(page)).to_contain_text("Not answered.")
        _button(page, "Conversations").click()
    else:
        expect(_answers(page)).not_to_contain_text("Not answered.")
        _button(page, "Conversations").click()
        _button(page, "New conversation").click()
        expect(_answers(page)).to_have_count(0)
        _kept(page).get_by_role("button", name=PARIS, exact=True).click()
        expect(_answers(page).locator(".stopped")).to_be_visible()
    expect(_kept(page)).to_have_count(1)
    expect(page.get_by_role("article", name="Prompt")).to_have_text(PARIS)


@pytest.mark.parametrize("meanwhile", ["a rename", "a refusal", "a stop", "another"])
@pytest.mark.parametrize("asks", ["again", "otherwise"])
def test_what_was_answered_is_kept_until_it_is_answered_anew(
    page: Page, asks: str, meanwhile: str
) -> None:
    _send(page, PARIS)
    expect(_button(page, "Again")).to_be_visible()
    answer = Late(page, "chat/completions")
    if asks == "again":
        _button(page, "Again").click()
    else:
        _edit(page, "Hello")
    answer.wait_until_asked()
    expect(_answers(page)).not_to_contain_text("Paris")
    if meanwhile == "a rename":
        _button(page, "Conversations").click()
        _kept(page).get_by_role("button", name="Rename").click()
        page.get_by_label("Name", exact=True).fill("Capitals")
        page.keyboard.press("Enter")
        expect(_kept(page)).to_contain_text("Capitals")
    elif meanwhile == "another":
        _button(page, "Conversations").click()
        _button(page, "New conversation").click()
        _kept(page).get_by_role("button", name=PARIS, exact=True).click()
    else:
        if meanwhile == "a refusal":
            answer.refuse(429, "Too many.")
        else:
            _button(page, "Stop").last.click()
        told = "Too many." if meanwhile == "a refusal" else "Stopped after"
        expect(_answers(page)).to_contain_text(told)
        if asks == "again":
            expect(_answers(page)).to_contain_text("This is the answer from before.")
            expect(_answers(page)).to_contain_text("Paris")
    if meanwhile != "another":
        page.reload()
    expect(page.get_by_role("article", name="Prompt")).to_have_text(PARIS)
    expect(_answers(page)).to_contain_text("Paris")


@pytest.mark.parametrize("refused", [False, True])
def test_what_was_answered_is_kept_whatever_other_panes_answer(page: Page, refused: bool) -> None:
    _button(page, "Compare").click()
    _send(page, PARIS)
    for answer in (_answers(page).first, _answers(page).last):
        expect(answer.get_by_role("button", name="Again")).to_be_visible()
    expect(_answers(page).first).to_contain_text("Paris")
    late = Late(page, "chat/completions")
    _answers(page).first.get_by_role("button", name="Again").click()
    late.wait_until_asked()
    page.route("**/v1/chat/completions", lambda route: route.continue_())
    again = _answers(page).last.get_by_role("button", name="Again")
    if refused:
        _button(page, "Parameters").click()
        page.locator('[name="temperature"]').fill("3")
        again.click()
        expect(page.locator('[name="temperature"]')).to_be_focused()
        page.locator('[name="system"]').fill("Be short.")  # saves the conversation
    else:
        again.click()
        expect(again).to_be_visible()
    expect(_answers(page).first).to_have_attribute("aria-busy", "true")
    page.reload()
    expect(_answers(page).first).to_contain_text("Paris")


def test_turns_behind_one_that_is_edited_are_kept_though_they_were_being_answered(
    page: Page,
) -> None:
    _send(page, PARIS)
    expect(_button(page, "Again")).to_be_visible()
    answer = Late(page, "chat/completions")
    _send(page, "Hello")
    answer.wait_until_asked()
    # Wait until the page has cancelled the pending request.
    with page.expect_request("**/v1/requests/*"):
        _edit(page, "Other")
    page.reload()
    expect(page.get_by_role("article", name="Prompt")).to_have_text([PARIS, "Hello"])
    expect(_answers(page).first).to_contain_text("Paris")
    # Continuing after the edit replaces the later turns for good.
    answer = Late(page, "chat/completions")
    _edit(page, "Other")
    answer.refuse(429, "Too many.")
    expect(_answers(page)).to_contain_text("Too many.")
    _send(page, "Hi")
    expect(_button(page, "Again")).to_be_visible()
    page.reload()
    expect(page.get_by_role("article", name="Prompt")).to_have_text(["Other", "Hi"])


def test_a_wrong_field_stops_nothing_and_leaves_what_is_written(page: Page) -> None:
    _send(page, PARIS)
    expect(_answers(page)).to_contain_text("Paris")
    answer = Late(page, "chat/completions")
    _send(page, "Hello")
    answer.wait_until_asked()
    _button(page, "Parameters").click()
    wrong = page.locator('[name="temperature"]')
    wrong.fill("3")
    page.locator("#prompt").fill("A draft")
    _edit(page, "Other")
    expect(wrong).to_be_focused()
    first = page.get_by_role("region", name="Turn", exact=True).first
    expect(first.get_by_role("textbox", name="Prompt")).to_have_value("Other")
    expect(page.locator("#prompt")).to_have_value("A draft")
    answer.answer()
    expect(_button(page, "Again")).to_be_visible()
    expect(_answers(page).first).to_contain_text("Paris")
    expect(_answers(page).last.locator(".markdown").last).not_to_be_empty()


def test_a_prompt_that_is_being_edited_stays_whatever_is_drawn(page: Page) -> None:
    _send(page, PARIS)
    expect(_button(page, "Again")).to_be_visible()
    _button(page, "Edit the prompt").click()
    edited = page.get_by_role("region", name="Turn", exact=True).first.get_by_role(
        "textbox", name="Prompt"
    )
    edited.fill("Repeat: other")
    _button(page, "Compare").click()
    expect(page.get_by_role("button", name=re.compile("^Ask .* too$"))).to_be_visible()
    _button(page, "Remove model 2").click()
    _send(page, "Hello")
    expect(_answers(page)).to_have_count(2)
    expect(_button(page, "Again")).to_be_visible()
    edited.focus()
    other = page.context.new_page()
    other.goto(page.url)
    expect(_model(other)).to_have_value("demo")
    _send(other, "Hi")
    expect(_button(other, "Again")).to_be_visible()
    _button(page, "Conversations").click()
    expect(edited).to_have_value("Repeat: other")
    page.get_by_role("region", name="Turn").first.get_by_role("button", name="Send").click()
    expect(_answers(page)).to_have_count(1)
    expect(_answers(page)).to_contain_text("other")
    expect(_kept(page)).to_have_count(2)
    other.reload()
    other.get_by_role("button", name="Conversations", exact=True).click()
    _kept(other).last.get_by_role("button", name=PARIS, exact=True).click()
    expect(other.get_by_role("article", name="Prompt")).to_have_text([PARIS, "Hello", "Hi"])
    other.close()


def test_a_conversation_that_is_open_goes_on_when_it_is_chosen(page: Page) -> None:
    answer = Late(page, "chat/completions")
    _send(page, PARIS)
    answer.wait_until_asked()
    _button(page, "Conversations").click()
    _kept(page).get_by_role("button", name=PARIS, exact=True).click()
    answer.answer()
    expect(_answers(page)).to_contain_text("Paris")


def test_a_conversation_that_goes_on_in_another_tab_goes_on_here(page: Page) -> None:
    _send(page, PARIS)
    expect(_button(page, "Again")).to_be_visible()
    other = page.context.new_page()
    other.goto(page.url)
    expect(_model(other)).to_have_value("demo")
    _send(other, "Hello")
    expect(_button(other, "Again")).to_be_visible()
    other.close()
    expect(_answers(page)).to_have_count(2)
    expect(_answers(page).last.locator(".markdown").last).not_to_be_empty()
    _button(page, "Parameters").click()
    page.locator('[name="system"]').fill("Be short.")
    page.reload()
    expect(page.get_by_role("article", name="Prompt")).to_have_text([PARIS, "Hello"])
    expect(page.locator('[name="system"]')).to_have_value("Be short.")


def test_what_two_tabs_do_with_one_conversation_is_kept_as_two(page: Page) -> None:
    _send(page, PARIS)
    expect(_button(page, "Again")).to_be_visible()
    answer = Late(page, "chat/completions")
    _send(page, "Hello")
    answer.wait_until_asked()
    other = page.context.new_page()
    other.goto(page.url)
    expect(_model(other)).to_have_value("demo")
    _send(other, "Hi")
    expect(_button(other, "Again")).to_be_visible()
    answer.answer()
    expect(_button(page, "Again")).to_be_visible()
    expect(page.get_by_role("alert")).to_contain_text("Another tab has changed this conversation")
    _button(other, "Conversations").click()
    expect(_kept(other)).to_have_count(2)
    expect(other.get_by_role("article", name="Prompt")).to_have_text([PARIS, "Hello", "Hi"])
    other.close()
    page.reload()
    expect(page.get_by_role("article", name="Prompt")).to_have_text([PARIS, "Hello"])
    expect(_answers(page).last.locator(".markdown").last).not_to_be_empty()


def test_a_name_that_is_given_in_another_tab_outlives_the_answer_here(page: Page) -> None:
    answer = Late(page, "chat/completions")
    _send(page, PARIS)
    answer.wait_until_asked()
    other = page.context.new_page()
    other.goto(page.url)
    _button(other, "Conversations").click()
    _button(other, f"Rename {PARIS}").click()
    other.get_by_label("Name", exact=True).fill("Capitals")
    other.keyboard.press("Enter")
    expect(_button(other, "Capitals")).to_be_visible()
    other.close()
    answer.answer()
    expect(_button(page, "Again")).to_be_visible()
    _button(page, "Conversations").click()
    expect(_kept(page)).to_have_count(1)
    expect(_kept(page)).to_contain_text("Capitals")


def test_a_conversation_that_is_deleted_before_it_is_answered_stays_deleted(page: Page) -> None:
    answer = Late(page, "chat/completions")
    _send(page, PARIS)
    answer.wait_until_asked()
    _button(page, "Conversations").click()
    _button(page, f"Delete {PARIS}").click()
    # A message reports the stopped answer.
    expect(page.get_by_role("status").filter(has_text="demo was stopped.")).to_have_count(1)
    expect(_kept(page)).to_have_count(0)


def test_a_name_is_written_while_an_answer_ends(page: Page) -> None:
    answer = Late(page, "chat/completions")
    _send(page, PARIS)
    _button(page, "Conversations").click()
    _button(page, f"Rename {PARIS}").click()
    name = page.get_by_label("Name", exact=True)
    name.fill("Cap")
    answer.answer()
    expect(_answers(page)).to_contain_text("Paris")
    expect(_answers(page)).to_have_attribute("aria-busy", "false")
    expect(name).to_be_focused()
    name.press("End")
    page.keyboard.type("itals")
    page.keyboard.press("Enter")
    expect(_button(page, "Capitals")).to_be_focused()


def test_who_gives_no_name_has_given_none(page: Page) -> None:
    _send(page, PARIS)
    expect(_button(page, "Again")).to_be_visible()
    _button(page, "Conversations").click()
    for key in ("Escape", "Enter"):
        _button(page, f"Rename {PARIS}").click()
        page.get_by_label("Name", exact=True).press(key)
        expect(_button(page, PARIS)).to_be_focused()
    # A conversation without a name is listed by its first prompt, which changes here.
    _edit(page, "Hello")
    expect(_button(page, "Rename Hello")).to_be_visible()


def test_a_model_that_is_removed_has_its_answer_stopped(page: Page) -> None:
    _button(page, "Compare").click()
    _said_by_the_test(page)
    _send(page, PARIS)
    expect(_answers(page)).to_have_count(2)
    page.evaluate("says.forEach((say) => say({ delta: { content: 'So' } }))")
    expect(_answers(page).filter(has_text="So")).to_have_count(2)
    _button(page, "Remove model 2").click()
    page.evaluate("void (says[0]({ delta: {}, finish_reason: 'stop' }), says[0]())")
    # No answer is pending any more.
    expect(_button(page, "Again")).to_be_visible()
    expect(_button(page, "Send")).to_be_visible()


def test_a_name_whose_field_goes_without_a_word_leaves_the_list_alone(page: Page) -> None:
    _send(page, PARIS)
    expect(_button(page, "Again")).to_be_visible()
    _button(page, "Conversations").click()
    _button(page, f"Rename {PARIS}").click()
    # Browsers fire no blur event for a field that gets hidden.
    page.evaluate("addEventListener('blur', (event) => event.stopImmediatePropagation(), true)")
    other = page.context.new_page()
    other.goto(page.url)
    other.evaluate("localStorage.clear()")
    other.close()
    expect(page.locator("#kept")).to_be_hidden()
    _send(page, "Hello")
    expect(_kept(page).get_by_role("button", name=PARIS, exact=True)).to_be_visible()


def test_a_conversation_that_has_gone_without_a_word_is_not_opened(page: Page) -> None:
    _send(page, PARIS)
    expect(_button(page, "Again")).to_be_visible()
    _button(page, "Conversations").click()
    _button(page, "New conversation").click()
    page.evaluate("localStorage.clear()")
    _kept(page).get_by_role("button", name=PARIS, exact=True).click()
    expect(_kept(page)).to_have_count(0)
    _send(page, "Hello")
    expect(_kept(page)).to_have_count(1)


def test_thoughts_that_are_closed_while_they_come_stay_closed(page: Page) -> None:
    _said_by_the_test(page)
    _send(page, "Hi")
    page.wait_for_function("says.length === 1")
    page.evaluate("says[0]({ delta: { reasoning_content: 'One.' } })")
    thoughts = _answers(page).locator("details")
    expect(thoughts.get_by_text("One.")).to_be_visible()
    thoughts.get_by_text("Thoughts").click()
    page.evaluate("says[0]({ delta: { reasoning_content: ' Two.' } })")
    expect(thoughts).to_contain_text("Two.")
    expect(thoughts.get_by_text("Two.")).to_be_hidden()


def test_results_are_sent_once_all_panes_have_answered(page: Page) -> None:
    _button(page, "Compare").click()
    _said_by_the_test(page)
    _send(page, "Hi")
    page.wait_for_function("says.length === 2")
    page.evaluate(
        """() => {
          const named = { name: "weather", arguments: "{}" };
          const delta = { tool_calls: [{ index: 0, id: "a", function: named }] };
          says[0]({ delta, finish_reason: "tool_calls" });
          says[0]();
          named.arguments = '{"city';
          says[1]({ delta });
        }"""
    )
    _button(page, "Send results").click()
    expect(page.get_by_role("alert")).to_contain_text("once all have answered")
    expect(page.get_by_role("region", name="Turn", exact=True)).to_have_count(1)
    page.evaluate(
        """() => {
          const delta = { tool_calls: [{ index: 0, function: { arguments: '": 1}' } }] };
          says[1]({ delta, finish_reason: "tool_calls" });
          says[1]();
        }"""
    )
    _button(page, "Send results").first.click()
    page.wait_for_function("says.length === 4")
    expect(page.get_by_role("alert")).to_be_hidden()


def test_the_focus_stays_with_an_answer_that_is_asked_again_and_stopped(page: Page) -> None:
    _send(page, PARIS)
    expect(_button(page, "Again")).to_be_visible()
    answer = Late(page, "chat/completions")
    _button(page, "Again").focus()
    page.keyboard.press("Enter")
    answer.wait_until_asked()
    expect(_answers(page).get_by_role("button", name="Stop", exact=True)).to_be_focused()
    page.keyboard.press("Enter")
    expect(_button(page, "Again")).to_be_focused()


def test_who_copies_twice_sees_the_button_as_it_was(page: Page) -> None:
    page.clock.install()
    same = page.evaluate_handle(
        """async () => {
            const { copyText, icon } = await import("/web/dom.js");
            const button = document.createElement("button");
            button.append(icon("copy"), "Copy");
            const before = button.innerHTML;
            await copyText("x", button);
            await copyText("x", button);
            return () => button.textContent === "Copy" && button.innerHTML === before;
        }"""
    )
    assert not same.evaluate("same => same()")
    page.clock.run_for(10_000)
    assert same.evaluate("same => same()")

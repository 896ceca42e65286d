"""Chat templates: rendering of messages, and the formats of reasoning and tool calls in responses.

See decisions 022 and 039 in docs/decisions.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import Template, TemplateError
from jinja2.ext import loopcontrols
from jinja2.nodes import Call, Const, Filter, Getattr
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from gateway.errors import InvalidRequest
from gateway.parsers import harmony
from gateway.parsers.reasoning import Tags
from gateway.parsers.reasoning import guess as guess_tags
from gateway.parsers.tools.forms import Form
from gateway.parsers.tools.forms import guess as guess_form
from gateway.tokenization.control_tokens import ControlTokens, GuardedText

_DICT_ATTRIBUTES = frozenset(dir(dict))
# Mark after the content of the last message if the model will continue this message. The rendered
# chat is cut at this mark. Messages should not contain these private-use characters.
_MARK = "\uf8ff\uf8fe\uf8ff"
# Names that a request must not set in `chat_template_kwargs`. Some of them are set by other request
# parameters. The others are arguments of transformers' `apply_chat_template`, not variables of a
# template.
_RESERVED = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "messages",
        "tokenize",
        "tools",
    }
)


_REFUSALS = (
    *(TemplateError, RecursionError),
    *(ArithmeticError, LookupError, TypeError, ValueError),
)
"""Errors that a template raises explicitly, or that its expressions raise for invalid messages."""


class ChatFormat:
    """A compiled chat template, with the formats of the model's reasoning and tool calls."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        source: str | None,
        special: Mapping[str, str],
        *,
        tool_form: Form | None = None,
        reasoning_tags: Tags | None = None,
        control_tokens_in_messages: bool = False,
        excludes_uncallable_tools: bool = False,
        stop_ids: tuple[int, ...] = (),
    ) -> None:
        """Compile the template.

        Args:
            tokenizer: the model's tokenizer.
            source: the template; None if the model has none.
            special: the tokens that the tokenizer's configuration names, such as `bos_token`, by
                these names.
            tool_form: the format of tool calls; None to guess the format from the template.
            reasoning_tags: the tags around reasoning; None to guess the tags from the template.
            control_tokens_in_messages: True if clients may write control tokens in messages.
            excludes_uncallable_tools: True to omit the tools from a prompt if the response must not
                call any tool.
            stop_ids: ids that end a response, in addition to the model's end-of-sequence ids.

        Raises TemplateError for an invalid template.
        """
        self._template = compile_template(source) if source is not None else None
        self._special = special
        self._reserved = _RESERVED | special.keys()
        if self._template is not None:
            self._reserved |= self._template.globals.keys()
        self.tool_form = tool_form or guess_form(source or "")
        self.reasoning_tags = reasoning_tags or guess_tags(source or "")
        self.stop_ids = stop_ids
        self.excludes_uncallable_tools = excludes_uncallable_tools
        self._control = None
        if not control_tokens_in_messages:
            # Do not treat reasoning tags as control tokens. Templates search for these tags in
            # messages, to remove the reasoning of earlier responses.
            self._control = ControlTokens(
                tokenizer, source or "", self.reasoning_tags or (), replaced_words(source or "")
            )

    def render(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        extra: dict[str, Any] | None = None,
        *,
        open_turn: bool = True,
        continue_last: bool = False,
        guided: bool = False,
    ) -> str | GuardedText:
        """Return the text of a chat, rendered by the template.

        The arguments are data for the template and are never compiled. If clients must not write
        control tokens and the arguments may contain some, the result is a GuardedText.

        Args:
            messages: the messages of the chat.
            tools: the tools that the model may call.
            extra: additional variables of the template.
            open_turn: True to end the text with the beginning of the assistant's turn.
            continue_last: True to end the text with the content of the last message, which the
                model continues; `open_turn` is then ignored.
            guided: True if guided decoding constrains the response. The response then has only
                content and no markup. In the harmony format, the prompt therefore ends with the
                header of the channel `final`, so that the model writes content next.

        Raises InvalidRequest if the template refuses the messages, or if the model has no template.
        """
        if self._template is None:
            raise InvalidRequest(
                "This model has no chat template; use /v1/completions.", param="messages"
            )
        for name in self._reserved.intersection(extra or ()):
            raise InvalidRequest(
                f"chat_template_kwargs: {name} is not for a request to set.",
                param=f"chat_template_kwargs.{name}",
            )
        control = self._control
        if control is not None and control.may_occur_in((messages, tools, extra)):
            messages, tools, extra = map(control.hide, (messages, tools, extra))
        else:
            control = None
        try:
            variables = {**(extra or {}), **self._special}
            if continue_last:
                messages = _mark_last(messages)
            variables |= {"messages": messages, "tools": tools}
            variables["add_generation_prompt"] = open_turn and not continue_last
            text = self._template.render(variables)
        except _REFUSALS as error:
            why = f"The model's chat template refused the messages: {error}"
            if control is not None:
                why = control.restore(why)
            raise InvalidRequest(why, param="messages") from error
        if continue_last:
            text = _up_to_mark(text)
        if guided and self.tool_form == "openai" and text.endswith(harmony.TURN):
            text += harmony.FINAL
        return text if control is None else control.build_guarded(text)


class _Environment(ImmutableSandboxedEnvironment):
    def getattr(self, obj: Any, attribute: str) -> Any:
        """Return the value of the key `attribute` of a dict, or the attribute of any other object.

        Jinja's own method looks for an attribute first. For each key of a dict, this raises an
        exception, which is slow. With this method, rendering a chat of 20 messages takes 41 us
        instead of 74 us (python -m bench.packing).
        """
        if type(obj) is dict and attribute in obj and attribute not in _DICT_ATTRIBUTES:
            return obj[attribute]
        return super().getattr(obj, attribute)


def compile_template(source: str) -> Template:
    """Compile a chat template in the same Jinja environment as transformers' `apply_chat_template`.

    The environment has trimmed blocks, loop controls, `tojson` without HTML escapes,
    `raise_exception` and `strftime_now`. Raises TemplateError for an invalid template.
    """
    environment = _environment()
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda fmt: datetime.now().strftime(fmt)
    try:
        template = environment.from_string(source)
    except RecursionError as error:
        raise TemplateError("it is nested too deeply") from error
    # Replace the template's ChainMap of globals by a dict, because Jinja copies these globals at
    # each rendering. Rendering a short chat then takes 4 us instead of 9 us (python -m
    # bench.packing).
    template.globals = dict(template.globals)
    return template


def replaced_words(source: str) -> set[str]:
    """Return the words that a chat template replaces, by `str.replace` or Jinja's `replace`."""
    tree = _environment().parse(source)
    calls: list[Call | Filter] = [
        call
        for call in tree.find_all(Call)
        if isinstance(call.node, Getattr) and call.node.attr == "replace"
    ]
    calls += [call for call in tree.find_all(Filter) if call.name == "replace"]
    found = [call.args[0] for call in calls if call.args]
    words = {word.value for word in found if isinstance(word, Const)}
    return {word for word in words if word and isinstance(word, str)}


def _environment() -> _Environment:
    return _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])


def _tojson(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _mark_last(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages with `_MARK` after the content of the last message.

    Raises InvalidRequest if the last message has tool calls, which would follow the content.
    """
    *before, last = messages
    if last.get("tool_calls"):
        raise InvalidRequest(
            "continue_final_message: the last message ends with calls, behind which no text goes.",
            param="continue_final_message",
        )
    return [*before, last | {"content": last["content"].rstrip() + _MARK}]


def _up_to_mark(text: str) -> str:
    """Return the rendered chat up to `_MARK`, which ends the content of the last message.

    Raises InvalidRequest if the template has omitted the last message.
    """
    open_chat, found, _ = text.rpartition(_MARK)
    if not found:
        raise InvalidRequest(
            "continue_final_message: the last message is not in the rendered chat.",
            param="continue_final_message",
        )
    return open_chat


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)

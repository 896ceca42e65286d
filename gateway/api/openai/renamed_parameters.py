"""Parameters that other servers name differently, with the conversion to fields of this server."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from pydantic import BaseModel

from gateway.errors import InvalidRequest, UnsupportedParameter

Fields = dict[str, Any]

CONTAINERS = ("options", "nvext", "extra_body")
"""Objects in a body whose members count as top-level parameters.

Clients of Ollama send `options`, clients of NVIDIA Dynamo `nvext`. `extra_body` is an argument of
OpenAI's Python package, which sends only the members. Other clients may send the object itself.
"""


def _no_hints(_: Any) -> Iterable[str]:
    return ()


class RenamedParameter(NamedTuple):
    """A parameter of other servers that stands for a field of this server.

    Attributes:
        path: the field that the parameter stands for, or the path of a member of a field.
        read: converts the parameter's value to fields of the request. Raises InvalidRequest.
        hints: returns the paths of the value's members that have no effect here, such as
            `reasoning.summary`.
        members: the known members if the value is an object; None for other values.
    """

    path: str
    read: Callable[[Any], Fields]
    hints: Callable[[Any], Iterable[str]] = _no_hints
    members: frozenset[str] | None = None

    @property
    def root(self) -> str:
        return self.path.partition(".")[0]

    def fits(self, model: type[BaseModel]) -> bool:
        return self.root in model.model_fields


def _make_alias(name: str) -> RenamedParameter:
    return RenamedParameter(name, lambda value: {name: value})


def _make_guide(kind: str) -> RenamedParameter:
    """Return a `RenamedParameter` that stands for the member `kind` of `structured_outputs`.

    An empty value of the parameter has no effect.
    """

    def read(value: Any) -> Fields:
        return {} if value in ("", {}) else {"structured_outputs": {kind: value}}

    return RenamedParameter(f"structured_outputs.{kind}", read)


def _enable_thinking(value: Any, name: str = "enable_thinking") -> Fields:
    # Refuse strings. Templates compare `enable_thinking` with false or test its truth value. The
    # string "false" is truthy.
    if not isinstance(value, bool):
        raise InvalidRequest(f"{name}: Input should be true or false.", param=name)
    return {"chat_template_kwargs": {"enable_thinking": value}}


def _parse_think(value: Any) -> Fields:
    if isinstance(value, str):
        return {"reasoning_effort": value}
    return _enable_thinking(value, "think")


def _parse_thinking(value: Any) -> Fields:
    kind = value.get("type") if isinstance(value, dict) else value
    fields = _THINKING.get(kind) if isinstance(kind, str | bool) else None
    if fields is None:
        raise UnsupportedParameter(
            "thinking: allowed: true, false, and an object whose type is enabled, disabled, "
            "adaptive or auto.",
            param="thinking",
        )
    clear = value.get("clear_thinking") if isinstance(value, dict) else None
    if clear is not None:
        fields = {"chat_template_kwargs": {**fields.get("chat_template_kwargs", {})}}
        fields["chat_template_kwargs"]["clear_thinking"] = clear
    return fields


_THINKING: Mapping[str | bool, Fields] = {
    **dict.fromkeys((True, "enabled"), _enable_thinking(True)),
    **dict.fromkeys((False, "disabled"), _enable_thinking(False)),
    # With these values, the model decides whether to think. That is the default, so set no field.
    "adaptive": {},
    "auto": {},
}


def _find_thinking_hints(value: Any) -> Iterable[str]:
    if isinstance(value, dict) and value.get("budget_tokens") is not None:
        yield "thinking.budget_tokens"


def _make_thinking_budget(name: str) -> RenamedParameter:
    """Return the description of the parameter `name`, which limits the number of reasoning tokens.

    The value 0 disables reasoning, and -1 means no limit. Any other value has no effect, because
    engines cannot limit reasoning tokens. In this case, the header x-ignored-parameters names the
    parameter.
    """

    def read(value: Any) -> Fields:
        if isinstance(value, bool) or not isinstance(value, int) or value < -1:
            raise InvalidRequest(
                f"{name}: Input should be a number of tokens, 0 or -1.", param=name
            )
        return _enable_thinking(False) if value == 0 else {}

    def hints(value: Any) -> Iterable[str]:
        return (name,) if value > 0 else ()

    return RenamedParameter("chat_template_kwargs.enable_thinking", read, hints)


def _parse_reasoning(value: Any) -> Fields:
    if not isinstance(value, dict):
        raise InvalidRequest("reasoning: Input should be an object.", param="reasoning")
    if value.get("exclude"):
        raise UnsupportedParameter(
            "reasoning.exclude is not supported by this server.", param="reasoning.exclude"
        )
    effort, enabled = value.get("effort"), value.get("enabled")
    fields = {} if effort is None else {"reasoning_effort": effort}
    return fields if enabled is None else fields | _enable_thinking(enabled, "reasoning.enabled")


def _find_reasoning_hints(value: Any) -> Iterable[str]:
    for name in ("max_tokens", "summary", "generate_summary", "context", "mode"):
        if value.get(name) is not None:
            yield f"reasoning.{name}"


def _parse_format(value: Any) -> Fields:
    if value in ("", {}):
        return {}
    if value == "json":
        return {"response_format": {"type": "json_object"}}
    schema = {"name": "format", "schema": value}
    return {"response_format": {"type": "json_schema", "json_schema": schema}}


def _parse_greedy(value: Any) -> Fields:
    return {"temperature": 0} if value is True else {}


RENAMED: Mapping[str, RenamedParameter] = {
    "ebnf": _make_guide("grammar"),
    "enable_thinking": RenamedParameter("chat_template_kwargs.enable_thinking", _enable_thinking),
    "format": RenamedParameter("response_format", _parse_format),
    "grammar": _make_guide("grammar"),
    "greed_sampling": RenamedParameter("temperature", _parse_greedy),
    "guided_choice": _make_guide("choice"),
    "guided_grammar": _make_guide("grammar"),
    "guided_json": _make_guide("json"),
    "guided_regex": _make_guide("regex"),
    "json_schema": _make_guide("json"),
    "max_new_tokens": _make_alias("max_tokens"),
    "max_thinking_tokens": _make_thinking_budget("max_thinking_tokens"),
    "n_predict": _make_alias("max_tokens"),
    "num_predict": _make_alias("max_tokens"),
    "random_seed": _make_alias("seed"),
    "reasoning": RenamedParameter(
        "reasoning_effort",
        _parse_reasoning,
        _find_reasoning_hints,
        frozenset(
            {
                *("effort", "enabled", "exclude"),
                *("max_tokens", "summary", "generate_summary", "context", "mode"),
            }
        ),
    ),
    "reasoning_budget": _make_thinking_budget("reasoning_budget"),
    "regex": _make_guide("regex"),
    "rep_pen": _make_alias("repetition_penalty"),
    "repeat_penalty": _make_alias("repetition_penalty"),
    "sampler_seed": RenamedParameter("seed", lambda value: {} if value == -1 else {"seed": value}),
    "stopping_strings": _make_alias("stop"),
    "think": RenamedParameter("chat_template_kwargs.enable_thinking", _parse_think),
    "thinking": RenamedParameter(
        "chat_template_kwargs.enable_thinking",
        _parse_thinking,
        _find_thinking_hints,
        frozenset({"type", "budget_tokens", "clear_thinking"}),
    ),
    "thinking_budget": _make_thinking_budget("thinking_budget"),
    "thinking_budget_tokens": _make_thinking_budget("thinking_budget_tokens"),
    "thinking_token_budget": _make_thinking_budget("thinking_token_budget"),
}

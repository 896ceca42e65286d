"""Request parameters: names of other servers, fields to ignore in messages, and hints."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import BaseModel

from gateway.api.anthropic.requests import MessagesRequest
from gateway.api.openai.parameter_table import HARMLESS, HINTS, NOT_SERVED
from gateway.api.openai.parameters import Parsed, parse
from gateway.api.openai.renamed_parameters import RENAMED
from gateway.api.openai.schemas import ChatCompletionRequest, CompletionRequest
from gateway.api.responses.requests import InputTokensRequest, ResponseRequest
from gateway.errors import InvalidRequest, UnsupportedParameter
from gateway.parsers.tools.ids import TemplateIds

USER = {"role": "user", "content": "hi"}


def _chat(
    *, strict: bool = False, refuse_unknown: bool = False, **fields: Any
) -> Parsed[ChatCompletionRequest]:
    body = json.dumps({"model": "m", "messages": [USER]} | fields).encode()
    return parse(ChatCompletionRequest, body, strict=strict, refuse_unknown=refuse_unknown)


def _completion(**fields: Any) -> CompletionRequest:
    body = {"model": "m", "prompt": "hi"} | fields
    return parse(CompletionRequest, json.dumps(body).encode()).request


def test_each_name_has_one_meaning() -> None:
    kinds = [HARMLESS, HINTS, RENAMED.keys(), NOT_SERVED.keys()]
    assert len(set().union(*kinds)) == sum(map(len, kinds))
    fields = ChatCompletionRequest.model_fields.keys() | CompletionRequest.model_fields
    assert not fields & (HARMLESS | HINTS | RENAMED.keys())


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ({"max_new_tokens": 5}, {"max_tokens": 5}),
        ({"num_predict": -1}, {}),
        ({"max_tokens": -1}, {}),
        ({"max_tokens": -1.0}, {}),
        ({"max_tokens": 5.0, "num_predict": 5}, {"max_tokens": 5}),
        ({"best_of": 1.0, "n_probs": 0.0}, {}),
        ({"prompt_logprobs": False}, {}),
        ({"max_completion_tokens": -1, "max_tokens": 7}, {"max_tokens": 7}),
        ({"max_tokens": 5, "n_predict": 5}, {"max_tokens": 5}),
        ({"max_tokens": 30.0}, {"max_tokens": 30}),
        ({"repeat_penalty": 1.1}, {"repetition_penalty": 1.1}),
        ({"stopping_strings": ["a"]}, {"stop": ["a"]}),
        ({"enable_thinking": False}, {"chat_template_kwargs": {"enable_thinking": False}}),
        (
            {"thinking": {"type": "disabled"}, "chat_template_kwargs": {"a": 1}},
            {"chat_template_kwargs": {"a": 1, "enable_thinking": False}},
        ),
        ({"reasoning": {"effort": "low"}}, {"reasoning_effort": "low"}),
        ({"think": False}, {"chat_template_kwargs": {"enable_thinking": False}}),
        ({"think": "low"}, {"reasoning_effort": "low"}),
        ({"thinking_budget": 0}, {"chat_template_kwargs": {"enable_thinking": False}}),
        ({"thinking_token_budget": -1}, {}),
        ({"random_seed": 5}, {"seed": 5}),
        (
            {"nvext": {"ignore_eos": True, "greed_sampling": True}},
            {"ignore_eos": True, "temperature": 0},
        ),
        ({"guided_choice": ["a"]}, {"structured_outputs": {"choice": ["a"]}}),
        ({"guided_json": {"type": "object"}}, {"structured_outputs": {"json": {"type": "object"}}}),
        ({"grammar": ""}, {}),
        ({"format": "json"}, {"response_format": {"type": "json_object"}}),
        ({"options": {"num_predict": 5, "num_ctx": 9}}, {"max_tokens": 5}),
        ({"options": {"temperature": 0.1}, "temperature": 0.2}, {"temperature": 0.2}),
        ({"options": {"temperature": 0.1}, "temperature": None}, {"temperature": 0.1}),
    ],
)
def test_what_others_call_a_thing(given: dict[str, Any], meant: dict[str, Any]) -> None:
    request = _chat(**given).request
    assert request == _chat(**meant).request
    assert request.model_fields_set == _chat(**meant).request.model_fields_set


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"max_tokens": 5, "num_predict": 6}, "num_predict"),
        ({"max_tokens": True, "num_predict": 1}, "num_predict"),
        ({"max_tokens": 1, "num_predict": True}, "num_predict"),
        ({"top_a": False}, "top_a"),
        ({"num_predict": 5, "max_new_tokens": 6}, "max_new_tokens"),
        ({"enable_thinking": True, "thinking": {"type": "disabled"}}, "thinking"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
        ({"repeat_penalty": "high"}, "repeat_penalty"),
        ({"guided_regex": 5}, "guided_regex"),
        ({"thinking": "hard"}, "thinking"),
        ({"enable_thinking": "false"}, "enable_thinking"),
        ({"reasoning": {"enabled": 0}}, "reasoning.enabled"),
        ({"reasoning": {"exclude": True}}, "reasoning.exclude"),
        ({"thinking_budget": -2}, "thinking_budget"),
        ({"nvext": [1]}, "nvext"),
        ({"options": [1]}, "options"),
        ({"max_tokens": 30.5}, "max_tokens"),
        ({"n": -1}, "n"),
    ],
)
def test_what_cannot_be_meant_is_named_as_the_client_wrote_it(
    given: dict[str, Any], param: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        _chat(**given)
    assert caught.value.param == param
    assert caught.value.message.startswith(param)


@pytest.mark.parametrize(
    ("given", "unknown"),
    [
        ({"next_months": 1}, "next_months"),
        ({"options": {"next_months": 1}}, "next_months"),
        ({"stream": True, "stream_options": {"next_months": 1}}, "stream_options.next_months"),
        ({"reasoning": {"effort": "low", "next_months": 1}}, "reasoning.next_months"),
        ({"response_format": {"type": "text", "next_months": 1}}, "response_format.next_months"),
    ],
)
def test_an_unknown_name_is_told_or_refused(given: dict[str, Any], unknown: str) -> None:
    found = _chat(**given)
    assert (found.hints, found.unknown) == ((unknown,), (unknown,))
    for rule in ({"strict": True}, {"refuse_unknown": True}):
        with pytest.raises(InvalidRequest, match="next_months"):
            _chat(**given, **rule)


def test_an_unknown_name_is_told_beside_a_wrong_value_of_another() -> None:
    with pytest.raises(InvalidRequest) as caught:
        _chat(stream=True, stream_options={"next_months": 1, "include_usage": "yes"})
    assert caught.value.message.startswith("stream_options.include_usage")


def test_a_refusal_names_a_similar_parameter() -> None:
    with pytest.raises(InvalidRequest, match=r"temprature\. Did you mean temperature\?"):
        _chat(temprature=1, refuse_unknown=True)


def test_names_of_any_size_and_number_are_cut() -> None:
    found = _chat(**{"x" * 10_000 + str(number): 1 for number in range(100)})
    assert max(map(len, found.unknown)) < 250


@pytest.mark.parametrize(
    "given",
    [
        {"think": True, "reasoning_format": "parsed", "reasoning_split": True},
        {"think": "low", "request_id": "r", "vllm_xargs": {}, "cache_control": {}},
        {"thinking": {"type": "adaptive"}, "mm_processor_kwargs": {}},
        {"top_p_min": 0.0, "prompt_ignore_length": 0, "early_stopping": False, "top_k": 0},
        {"stream": True, "stream_options": {"chunk_include_usage": True}},
        {"messages": [{"role": "user", "content": [{"type": "input_text", "text": "a"}]}]},
    ],
)
def test_what_changes_nothing_is_accepted_without_a_word(given: dict[str, Any]) -> None:
    assert _chat(**given, strict=True).hints == ()


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        ({"thinking_budget": 100}, "thinking_budget"),
        ({"nvext": {"max_thinking_tokens": 100}}, "max_thinking_tokens"),
        ({"reasoning": {"max_tokens": 100}}, "reasoning.max_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 100}}, "thinking.budget_tokens"),
        ({"nvext": {"agent_hints": {"osl": 1}}}, "agent_hints"),
    ],
)
def test_a_wish_within_an_object_is_a_hint(given: dict[str, Any], hint: str) -> None:
    assert _chat(**given).hints == (hint,)
    assert _chat(**given).unknown == ()
    with pytest.raises(UnsupportedParameter, match=hint):
        _chat(**given, strict=True)


@pytest.mark.parametrize(
    "given",
    [
        {"reasoning_format": "raw"},
        {"vllm_xargs": {"a": 1}},
        {"chat_template": "x"},
        {"system": "Be brief."},
        {"max_output_tokens": 5},
        {"top_n_sigma": 1.0},
        {"nvext": {"use_raw_prompt": True}},
    ],
)
def test_what_would_change_an_answer_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedParameter):
        _chat(**given)


@pytest.mark.parametrize("model", [ResponseRequest, InputTokensRequest, MessagesRequest])
def test_no_name_of_another_protocol_is_unknown_in_a_chat(model: type[BaseModel]) -> None:
    chat = ChatCompletionRequest.model_fields.keys() | CompletionRequest.model_fields
    tables = HARMLESS | HINTS | RENAMED.keys() | NOT_SERVED.keys()
    assert model.model_fields.keys() - chat - tables == set()


@pytest.mark.parametrize("seed", [-(2**63) - 1, 2**63, 2**64, -(2**70), 1e30])
def test_a_seed_outside_64_bits_is_refused_with_exact_limits(seed: float) -> None:
    with pytest.raises(InvalidRequest) as caught:
        _chat(seed=seed)
    assert caught.value.message.startswith(
        "seed: Input should be an integer from -9223372036854775808 to 9223372036854775807; found "
    )


@pytest.mark.parametrize("seed", [-(2**63), 2**63 - 1, 5.0])
def test_a_seed_of_64_bits_is_taken(seed: float) -> None:
    assert _chat(seed=seed).request.seed == seed
    assert _chat(random_seed=seed).request.seed == seed


def test_a_length_of_minus_one_is_the_models_maximum() -> None:
    assert _chat(truncate_prompt_tokens=-1).request.truncate_prompt_tokens == -1
    for length in (0, -2):
        with pytest.raises(InvalidRequest, match="at least 1, or -1"):
            _chat(truncate_prompt_tokens=length)


@pytest.mark.parametrize("name", sorted(HINTS))
def test_hints_are_named_and_refused_where_that_is_wanted(name: str) -> None:
    assert _chat(**{name: "anything"}).hints == (name,)
    assert _chat(options={name: 1}, user="u").hints == (name,)
    with pytest.raises(UnsupportedParameter, match=name):
        _chat(**{name: "anything"}, strict=True)


@pytest.mark.parametrize("choice", [{}, {"tool_choice": "auto"}])
def test_strict_is_a_hint_where_the_model_decides_whether_it_calls(choice: dict[str, Any]) -> None:
    tools = [
        {"type": "function", "function": {"name": "f", "strict": False}},
        {"type": "function", "function": {"name": "g", "strict": True}},
        {"type": "function", "function": {"name": "h", "strict": True}},
    ]
    assert _chat(tools=tools, **choice).hints == ("tools.function.strict",)
    with pytest.raises(UnsupportedParameter) as caught:
        _chat(tools=tools, **choice, strict=True)
    assert caught.value.param == "tools[1].function.strict"
    named = {"type": "function", "function": {"name": "f"}}
    for enforced in ("required", named, "none"):
        assert _chat(tools=tools, tool_choice=enforced, strict=True).hints == ()
    assert _chat(tools=tools[:1], strict=True, **choice).hints == ()


def _answers(schema: dict[str, Any]) -> dict[str, Any]:
    said = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    return {"response_format": said}


@pytest.mark.parametrize(
    "form",
    [
        {"structured_outputs": {"regex": "a"}},
        {"structured_outputs": {"json_object": True}},
        {"response_format": {"type": "json_object"}},
        _answers({"type": "object"}),
        _answers({"type": "object", "properties": {"a": {}}, "required": None}),
        _answers({"type": "array", "items": {"type": "string"}}),
        _answers({"anyOf": [{"type": "object"}, {"type": "array"}]}),
    ],
)
def test_tools_are_a_hint_where_a_format_rules_calls_out(form: dict[str, Any]) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert _chat(tools=tools, **form).hints == ("tools",)
    with pytest.raises(UnsupportedParameter, match=r"^tools: ") as caught:
        _chat(tools=tools, **form, strict=True)
    assert caught.value.param == "tools"
    assert _chat(tools=tools, tool_choice="none", strict=True, **form).hints == ()
    text = {"response_format": {"type": "text"}}
    assert _chat(tools=tools, strict=True, **text).hints == ()
    # A forced call beside a format is refused later, so no hint is needed.
    assert _chat(tools=tools, tool_choice="required", strict=True, **form).hints == ()


TITLE = _answers({"type": "object", "properties": {"title": {"type": "string"}}})


def test_tools_may_be_called_where_the_format_is_an_object_of_known_properties() -> None:
    tools = [{"type": "function", "function": {"name": "f", "strict": True}}]
    assert _chat(tools=tools, strict=True, **TITLE).hints == ()


def test_a_tool_that_is_not_strict_is_no_reason_to_refuse_a_format() -> None:
    odd = {"type": "object", "properties": {"a": {"not": {}}}}
    tools = [
        {"type": "function", "function": {"name": "f", "parameters": odd}},
        {"type": "function", "function": {"name": "g", "strict": True}},
    ]
    chat = _chat(tools=tools, **TITLE).request
    guide, param = chat.build_guide()
    looser = chat.build_looser_guide()
    assert param == "response_format"
    assert guide is not None
    assert looser is not None
    assert '"not"' in guide.text
    assert '"not"' not in looser.text
    assert [name for _, name in chat.build_guide_parts()] == [
        "response_format",
        "tools[1].function.parameters",
    ]
    assert guide.best_effort == (
        ("$.$defs.answer", "response_format.json_schema.schema"),
        ("$.$defs.arguments0", "tools[0].function.parameters"),
    )
    tools[0]["function"] |= {"strict": True}
    assert _chat(tools=tools, **TITLE).request.build_looser_guide() is None


def test_an_endpoint_refuses_what_only_the_other_one_serves() -> None:
    _chat(best_of=1, add_special_tokens=False)
    _completion(add_special_tokens=True, tools=[], tool_choice="auto")
    for given in ({"best_of": 2}, {"add_special_tokens": True}):
        with pytest.raises(UnsupportedParameter):
            _chat(**given)
    for given in ({"add_special_tokens": False}, {"tools": [1]}, {"enable_thinking": True}):
        with pytest.raises(UnsupportedParameter):
            _completion(**given)
    with pytest.raises(InvalidRequest):
        _completion(messages=[USER])


def test_what_clients_leave_in_a_conversation_is_passed_over() -> None:
    call = {
        "id": "c1",
        "type": "function",
        "index": 0,
        "provider_specific_fields": None,
        "function": {"name": "f", "arguments": {"x": [1]}, "thought_signature": "s"},
    }
    nothing = {"id": "c2", "type": "function", "function": {"name": "g", "arguments": None}}
    refusal = {"type": "refusal", "refusal": "No."}
    text = {"type": "text", "text": "Well. ", "cache_control": {"type": "ephemeral"}}
    request = _chat(
        messages=[
            {"role": "user", "content": [text], "id": "m1", "timestamp": 5},
            {
                "role": "assistant",
                "content": [text, refusal],
                "provider_specific_fields": {"refusal": None},
                "refusal": None,
                "thinking_blocks": [{"type": "thinking"}],
                "reasoning_details": [{"text": "t"}],
                "annotations": [{"url": "u"}],
                "tool_calls": [call, nothing],
                "prefix": False,
            },
        ],
        tools=[
            {
                "type": "function",
                "strict": True,
                "cache_control": {"type": "ephemeral"},
                "function": {"name": "f", "parameters": {}, "cache_control": None},
            }
        ],
    ).request
    user, assistant = [message.to_template(TemplateIds(None)) for message in request.messages]
    assert user == {"role": "user", "content": "Well. "}
    assert assistant["content"] == "Well. No."
    assert [c["function"]["arguments"] for c in assistant["tool_calls"]] == [{"x": [1]}, {}]
    assert assistant.keys() == {"role", "content", "tool_calls"}
    assert request.offered_tools == [
        {"type": "function", "function": {"name": "f", "parameters": {}}}
    ]


@pytest.mark.parametrize(
    "field",
    [
        {"prefix": True},
        {"partial": True},
        {"images": ["aGk="]},
        {"audio": {"id": "a"}},
        {"function_call": {"name": "f", "arguments": ""}},
    ],
)
def test_what_would_be_missed_in_a_message_is_refused(field: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        _chat(messages=[USER, {"role": "assistant", "content": "x"} | field])
    assert caught.value.message.startswith(f"messages[1].{next(iter(field))}")


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file"])
def test_a_part_that_is_not_text_alone_is_refused(kind: str) -> None:
    part = {"type": "text", "text": "What is this?", kind: {"url": "data:"}}
    with pytest.raises(InvalidRequest, match=kind):
        _chat(messages=[{"role": "user", "content": [part]}])


def test_of_a_key_that_a_model_wrote_twice_the_last_counts() -> None:
    call = {"id": "c", "function": {"name": "f", "arguments": '{"x": 1, "y": {"x": 2}, "x": 3}'}}
    said = {"role": "assistant", "content": None, "tool_calls": [call]}
    message = _chat(messages=[USER, said]).request.messages[1].to_template(TemplateIds(None))
    assert message["tool_calls"][0]["function"]["arguments"] == {"x": 3, "y": {"x": 2}}


def test_what_an_assistant_declined_with_is_what_it_said() -> None:
    declined = {"role": "assistant", "content": None, "refusal": "No."}
    message = _chat(messages=[USER, declined]).request.messages[1]
    assert message.to_template(TemplateIds(None)) == {"role": "assistant", "content": "No."}

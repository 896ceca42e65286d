"""Stored responses and conversations of /v1/responses: OpenAI's own package, the real stack."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent

from tests.support.gateway_process import GatewayProcess, tenant, write_config
from tests.support.local_stack import Stack
from tests.support.patience import PATIENCE_S
from tests.support.redis_server import RedisServer

FRANCE = "What is the capital of France?"
ITALY = "And of Italy?"
WEATHER = "What is the weather in Paris?"
TOOL: dict[str, Any] = {
    "type": "function",
    "name": "get_weather",
    "description": "Get the weather in a city",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


def ask(client: openai.OpenAI, said: Any, **fields: Any) -> Response:
    """Return the response. Check that the streamed and the complete response are stored as sent.

    The two are stored by different code.
    """
    wanted = {"model": "demo", "temperature": 0, "max_output_tokens": 40, "input": said}
    *_, last = client.responses.create(**wanted | fields, stream=True)
    streamed = last.response
    whole = client.responses.create(**wanted | fields)
    assert streamed.output_text == whole.output_text
    for answer in (streamed, whole):
        assert client.responses.retrieve(answer.id).to_dict() == answer.to_dict()
    return whole


def answered(client: openai.OpenAI, said: Any, **fields: Any) -> Response:
    wanted = {"model": "demo", "temperature": 0, "max_output_tokens": 40, "input": said}
    answer: Response = client.responses.create(**wanted | fields)
    return answer


def turn(role: str, text: str) -> dict[str, str]:
    return {"role": role, "content": text}


def test_a_conversation_goes_on_from_its_last_response(client: openai.OpenAI) -> None:
    first = ask(client, FRANCE, instructions="Be brief.", metadata={"k": "v"})
    assert first.store
    assert first.metadata == {"k": "v"}
    second = ask(client, ITALY, previous_response_id=first.id)
    third = ask(client, "Thanks", previous_response_id=second.id)
    # Instructions of an earlier response are not inherited.
    said = [turn("user", FRANCE), turn("assistant", first.output_text), turn("user", ITALY)]
    same = answered(client, said, store=False)
    assert not same.store
    assert (same.output_text, same.usage.input_tokens) == (
        second.output_text,
        second.usage.input_tokens,
    )
    said += [turn("assistant", second.output_text), turn("user", "Thanks")]
    assert answered(client, said, store=False).usage.input_tokens == third.usage.input_tokens
    assert third.previous_response_id == second.id


def test_a_response_is_kept_before_its_client_is_told_that_it_is_complete(
    client: openai.OpenAI,
) -> None:
    events: list[ResponseStreamEvent] = []
    wanted: dict[str, Any] = {"model": "demo", "input": FRANCE, "max_output_tokens": 8}
    for event in client.responses.create(**wanted, stream=True):
        events.append(event)
        if event.type in ("response.completed", "response.incomplete"):
            again = client.responses.retrieve(event.response.id)
            assert again.to_dict() == event.response.to_dict()
    assert events[-1].type in ("response.completed", "response.incomplete")
    assert [event.sequence_number for event in events] == list(range(len(events)))


def test_what_is_not_stored_is_not_there(client: openai.OpenAI) -> None:
    answer = answered(client, FRANCE, store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(answer.id)
    with pytest.raises(openai.NotFoundError) as refused:
        answered(client, ITALY, previous_response_id=answer.id)
    assert refused.value.param == "previous_response_id"
    assert refused.value.code == "previous_response_not_found"


def test_a_tool_is_called_and_its_output_sent_alone(client: openai.OpenAI) -> None:
    called = ask(client, WEATHER, tools=[TOOL])
    [call] = [item for item in called.output if item.type == "function_call"]
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "Sunny, 21 C"}
    answer = ask(client, [output], tools=[TOOL], previous_response_id=called.id)
    assert "21" in answer.output_text
    items = client.responses.input_items.list(answer.id, order="asc").data
    assert [item.type for item in items] == ["message", "function_call", "function_call_output"]
    said = [turn("user", "Here it is:"), output | {"call_id": "call_of_nobody"}]
    with pytest.raises(openai.BadRequestError, match="call_of_nobody") as refused:
        answered(client, said, tools=[TOOL], previous_response_id=called.id)
    assert refused.value.param == "input[1].call_id"


def test_what_was_taken_out_of_a_conversation_leaves_no_output_alone(
    client: openai.OpenAI,
) -> None:
    call = {"type": "function_call", "call_id": "c1", "name": "get_weather", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c1", "output": "Sunny"}
    made = client.conversations.create(items=[turn("user", WEATHER), call])
    for endpoint in (client.responses.create, client.responses.input_tokens.count):
        with pytest.raises(openai.BadRequestError, match="c2") as refused:
            endpoint(model="demo", input=[output | {"call_id": "c2"}], conversation=made.id)
        assert refused.value.param == "input[0].call_id"
    assert answered(client, [output], tools=[TOOL], conversation=made.id).output_text
    items = client.conversations.items.list(made.id, order="asc").data
    client.conversations.items.delete(items[1].id, conversation_id=made.id)
    with pytest.raises(openai.BadRequestError, match="c1") as refused:
        answered(client, "Thanks", conversation=made.id)
    assert refused.value.param == "conversation"


def test_input_items_come_in_pages(client: openai.OpenAI) -> None:
    first = answered(client, [turn("developer", "Be brief."), turn("user", FRANCE)])
    second = answered(client, ITALY, previous_response_id=first.id)
    found = [*client.responses.input_items.list(second.id, limit=1, order="asc")]
    assert [item.role for item in found] == ["developer", "user", "assistant", "user"]
    texts = [item.content[0].text for item in found]
    assert texts == ["Be brief.", FRANCE, first.output_text, ITALY]
    assert len({item.id for item in found}) == 4
    newest = client.responses.input_items.list(second.id, limit=3)
    assert [item.id for item in newest.data] == [item.id for item in found[:0:-1]]
    assert newest.has_more
    digits = second.id.removeprefix("resp_")
    assert found[-1].id == f"msg_{digits}_i0"


def test_what_was_deleted_cannot_be_gone_on_from(client: openai.OpenAI) -> None:
    first = answered(client, FRANCE)
    second = answered(client, ITALY, previous_response_id=first.id)
    client.responses.delete(first.id)
    for gone in (client.responses.retrieve, client.responses.delete):
        with pytest.raises(openai.NotFoundError):
            gone(first.id)
    assert client.responses.retrieve(second.id).id == second.id
    with pytest.raises(openai.NotFoundError, match=first.id) as refused:
        answered(client, "Thanks", previous_response_id=second.id)
    assert refused.value.param == "previous_response_id"


def test_items_are_named_by_their_ids(client: openai.OpenAI) -> None:
    first = answered(client, FRANCE)
    question = client.responses.input_items.list(first.id).data[0].id
    said = [
        {"type": "item_reference", "id": question},
        {"id": first.output[-1].id},
        turn("user", ITALY),
    ]
    named = ask(client, said)
    same = answered(client, ITALY, previous_response_id=first.id)
    assert named.usage.input_tokens == same.usage.input_tokens
    missing = first.output[-1].id[:-1] + "7"
    with pytest.raises(openai.NotFoundError, match=missing):
        answered(client, [{"type": "item_reference", "id": missing}])
    many = [{"type": "item_reference", "id": question}] * 65
    with pytest.raises(openai.BadRequestError, match="item_reference"):
        answered(client, many)


def test_a_conversation_has_what_was_said_in_it(client: openai.OpenAI) -> None:
    made = client.conversations.create(
        metadata={"topic": "capitals"}, items=[turn("system", "Be brief.")]
    )
    first = answered(client, FRANCE, conversation=made.id)
    assert first.conversation.id == made.id
    with client.responses.stream(
        model="demo", input=ITALY, conversation={"id": made.id}, temperature=0, max_output_tokens=40
    ) as stream:
        second = stream.get_final_response()
    said = [
        *(turn("system", "Be brief."), turn("user", FRANCE), turn("assistant", first.output_text)),
        turn("user", ITALY),
    ]
    assert second.usage.input_tokens == answered(client, said).usage.input_tokens
    found = [*client.conversations.items.list(made.id, order="asc", limit=2)]
    assert [item.role for item in found] == ["system", "user", "assistant", "user", "assistant"]
    assert found[2].id == first.output[0].id
    newest = client.conversations.items.list(made.id, limit=2)
    assert [item.id for item in newest.data] == [found[4].id, found[3].id]
    assert newest.has_more
    one = client.conversations.items.retrieve(found[1].id, conversation_id=made.id)
    assert one.to_dict() == found[1].to_dict()


def test_items_that_are_sent_again_are_in_each_conversation(client: openai.OpenAI) -> None:
    """Check that resent items appear in each conversation, with their original ids.

    A resent item may also have the id of an item that was deleted from the conversation.
    """
    one, other = client.conversations.create(), client.conversations.create()
    first = answered(client, FRANCE, conversation=one.id)
    items: list[Any] = client.conversations.items.list(one.id, order="asc").to_dict()["data"]
    again = [*items, turn("user", ITALY)]
    second = answered(client, again, conversation=other.id)
    named = [{"type": "item_reference", "id": item["id"]} for item in items]
    third = answered(client, [*named, turn("user", ITALY)])
    assert second.usage.input_tokens == third.usage.input_tokens
    client.conversations.items.delete(items[1]["id"], conversation_id=one.id)
    answered(client, [*first.output, turn("user", ITALY)], conversation=one.id)
    for made in (one, other):
        found = client.conversations.items.list(made.id, order="asc").data
        assert [item.role for item in found] == ["user", "assistant"] * 2
    thanks = answered(client, "Thanks", conversation=other.id)
    same = answered(client, "Thanks", previous_response_id=second.id)
    assert thanks.usage.input_tokens == same.usage.input_tokens
    # Two copies in one response are two items, and listing them by pages ends.
    twice = answered(client, [*items, *items])
    pages = client.responses.input_items.list(twice.id, limit=1)
    assert len([*itertools.islice(pages, 9)]) == 4


def test_conversations_are_made_changed_and_deleted(client: openai.OpenAI) -> None:
    made = client.conversations.create()
    assert made.metadata == {}
    changed = client.conversations.update(made.id, metadata={"a": "b"})
    assert changed.metadata == {"a": "b"}
    assert client.conversations.retrieve(made.id).to_dict() == changed.to_dict()
    items = [turn("user", "one"), turn("assistant", "two")]
    added = client.conversations.items.create(made.id, items=items)
    assert [item.role for item in added.data] == ["user", "assistant"]
    assert (added.first_id, added.last_id) == (added.data[0].id, added.data[1].id)
    left = client.conversations.items.delete(added.data[0].id, conversation_id=made.id)
    assert left.id == made.id
    assert [item.id for item in client.conversations.items.list(made.id).data] == [added.last_id]
    deleted = client.conversations.delete(made.id)
    assert (deleted.id, deleted.deleted) == (made.id, True)
    for gone in (client.conversations.retrieve, client.conversations.items.list):
        with pytest.raises(openai.NotFoundError):
            gone(made.id)
    with pytest.raises(openai.NotFoundError):
        client.conversations.items.retrieve(added.last_id, conversation_id=made.id)
    with pytest.raises(openai.NotFoundError) as refused:
        answered(client, FRANCE, conversation=made.id)
    assert refused.value.param == "conversation"


def test_another_conversations_item_is_not_found(client: openai.OpenAI) -> None:
    one, other = (
        client.conversations.create(items=[turn("user", "a")]),
        client.conversations.create(),
    )
    [item] = client.conversations.items.list(one.id).data
    for gone in (client.conversations.items.retrieve, client.conversations.items.delete):
        with pytest.raises(openai.NotFoundError):
            gone(item.id, conversation_id=other.id)
    [same] = client.conversations.items.list(one.id).data
    assert same.id == item.id


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "resp_1", "conversation": "conv_1"}, "previous_response_id"),
        ({"store": False, "background": True}, "background"),
        ({"conversation": {}}, "conversation.id"),
        ({"metadata": {str(n): "" for n in range(17)}}, "metadata"),
        ({"metadata": {"k": "v" * 513}}, "metadata.k"),
    ],
)
def test_wishes_that_cannot_be_kept_are_refused_by_name(
    client: openai.OpenAI, fields: Any, param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        answered(client, FRANCE, **fields)
    assert refused.value.param == param


def test_too_many_items_and_items_that_are_not_served(client: openai.OpenAI) -> None:
    made = client.conversations.create()
    image: Any = {"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}
    for items, param in (([turn("user", "x")] * 21, "items"), ([image], "items[0].content[0]")):
        with pytest.raises(openai.BadRequestError) as refused:
            client.conversations.items.create(made.id, items=items)
        assert refused.value.param == param


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ({"limit": 101}, "limit"),
        ({"order": "up"}, "order"),
        ({"include": ["all"]}, "include"),
        ({"after": "msg_1"}, "after"),
    ],
)
def test_pages_that_there_are_not(client: openai.OpenAI, query: Any, param: str) -> None:
    made = client.conversations.create(items=[turn("user", "x")])
    with pytest.raises((openai.BadRequestError, openai.NotFoundError)) as refused:
        client.conversations.items.list(made.id, **query)
    assert refused.value.param == param


def test_counted_tokens_are_those_of_the_answer(stack: Stack, client: openai.OpenAI) -> None:
    first = answered(client, FRANCE)
    counted = client.responses.input_tokens.count(
        model="demo", input=ITALY, previous_response_id=first.id
    )
    second = answered(client, ITALY, previous_response_id=first.id)
    assert counted.input_tokens == second.usage.input_tokens


@pytest.fixture(scope="module")
def shared(
    stack: Stack, shared_redis: RedisServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[GatewayProcess]:
    """Yield a gateway of two workers and two tenants."""
    folder = tmp_path_factory.mktemp("kept")
    config = write_config(folder / "c.yaml", tenant("one", "sk-one"), tenant("two", "sk-two"))
    settings = {"workers": 2, "max_body_bytes": 256 * 1024, "redis_url": shared_redis.url}
    with GatewayProcess(folder / "g", stack, config=config, **settings) as gateway:
        yield gateway


def of_tenant(gateway: GatewayProcess, name: str) -> openai.OpenAI:
    """Return a client that opens a connection per request, so any worker may accept the request."""
    headers = {"connection": "close"}
    url = f"{gateway.url}/v1"
    return openai.OpenAI(
        base_url=url,
        api_key=f"sk-{name}",
        max_retries=0,
        default_headers=headers,
        timeout=PATIENCE_S,
    )


def test_any_worker_goes_on_and_no_other_tenant(shared: GatewayProcess) -> None:
    with of_tenant(shared, "one") as one, of_tenant(shared, "two") as two:
        last = answered(one, FRANCE, max_output_tokens=4)
        made = one.conversations.create(items=[turn("user", FRANCE)])
        item = one.conversations.items.list(made.id).data[0].id
        counts = []
        for _ in range(8):
            last = answered(one, ITALY, previous_response_id=last.id, max_output_tokens=4)
            counts.append(last.usage.input_tokens)
        assert counts == sorted(set(counts))
        refused: list[Callable[[], Any]] = [
            lambda: two.responses.retrieve(last.id),
            lambda: two.responses.delete(last.id),
            lambda: two.responses.input_items.list(last.id),
            lambda: answered(two, ITALY, previous_response_id=last.id),
            lambda: answered(two, ITALY, conversation=made.id),
            lambda: answered(two, [{"type": "item_reference", "id": last.output[0].id}]),
            lambda: answered(two, [{"type": "item_reference", "id": item}]),
            lambda: two.conversations.retrieve(made.id),
            lambda: two.conversations.update(made.id, metadata={}),
            lambda: two.conversations.delete(made.id),
            lambda: two.conversations.items.list(made.id),
            lambda: two.conversations.items.create(made.id, items=[turn("user", "x")]),
            lambda: two.conversations.items.retrieve(item, conversation_id=made.id),
            lambda: two.conversations.items.delete(item, conversation_id=made.id),
        ]
        for call in refused:
            with pytest.raises(openai.NotFoundError):
                call()
        assert one.responses.retrieve(last.id).id == last.id
        assert len(one.conversations.items.list(made.id).data) == 1


def test_no_conversation_is_longer_than_a_body_may_be(shared: GatewayProcess) -> None:
    with of_tenant(shared, "one") as one:
        made = one.conversations.create()
        for _ in range(5):
            one.conversations.items.create(made.id, items=[turn("user", "x" * 65_000)])
        with pytest.raises(openai.APIStatusError) as refused:
            answered(one, "x", conversation=made.id)
        assert (refused.value.status_code, refused.value.code) == (413, "conversation_too_large")
        one.conversations.delete(made.id)


def test_a_gateway_that_keeps_nothing_says_so(stack: Stack, tmp_path: Path) -> None:
    with (
        GatewayProcess(tmp_path / "g", stack, conversations_ttl=0) as gateway,
        of_tenant(gateway, "any") as client,
    ):
        answer = answered(client, FRANCE)
        assert not answer.store
        wishes: list[dict[str, Any]] = [
            {"store": True},
            {"previous_response_id": answer.id},
            {"conversation": "conv_1"},
            {"background": True},
        ]
        for wish in wishes:
            with pytest.raises(openai.BadRequestError) as refused:
                answered(client, FRANCE, **wish)
            assert [refused.value.param] == [*wish]
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(answer.id)
        with pytest.raises(openai.BadRequestError):
            client.conversations.create()

"""Responses as they are kept, and what a request that names one goes on from.

A record has what is new with its response, and the ids of those before it: to go on with a
conversation takes the last one and then, at once, the others. Ids of items hold that of what they
were kept with, so that a reference to one finds its record without an index.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import orjson
from pydantic import TypeAdapter, ValidationError

from gateway.api.intake import Intake
from gateway.api.responses import items
from gateway.api.responses.item_messages import chat_messages
from gateway.api.responses.toolset import Toolset
from gateway.api.validation import find_problem, join_path
from gateway.conversations.record import FINAL, Record
from gateway.conversations.store import Conversations
from gateway.errors import (
    ConversationsUnavailable,
    ConversationTooLarge,
    InvalidRequest,
    NotFound,
    PreviousResponseNotFound,
    UnsupportedParameter,
)
from gateway.tokenization import turn_record
from gateway.tokenization.turn_record import StoredTurns

Item = dict[str, Any]
"""One of input or output, as JSON."""
_ITEMS = TypeAdapter(list[items.Item])
_SOMETHING = items.MessageItem(role="user", content="")

FINISHED = FINAL
"""The least version of what changes no more. Any before it is a time in microseconds, or 1."""
LONGEST_CHAIN = 1024
MOST_ITEMS = 8192
"""That are earlier than a request."""
_MOST_REFERENCES = 64

_RESPONSE = re.compile(r"resp_[0-9a-f]{32}")
_ITEM = re.compile(r"[a-z]{2,4}_([0-9a-f]{32})_i?[0-9]{1,20}")
_PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "tool_search_call": "tsc",
    "tool_search_output": "tso",
    "additional_tools": "at",
}
_CONTINUABLE = ("completed", "incomplete")


class Kept(NamedTuple):
    """A response as it was kept.

    Attributes:
        response: the object as it was answered.
        input: its own new items.
        chain: the ids of the responses before it, oldest first; `before` are their bytes.
        nbytes: those and its own.
        turned: whether token ids are kept beside it.
    """

    response: dict[str, Any]
    input: list[Item]
    chain: list[str]
    before: int
    nbytes: int
    turned: bool

    @property
    def items(self) -> list[Item]:
        """What a request that follows has before its own."""
        output: list[Item] = self.response["output"]
        return self.input + output


class Earlier(NamedTuple):
    """What a request goes on from: items, oldest first, and what its own record needs of them.

    `turns` are those whose token ids are known.
    """

    items: list[Item]
    chain: list[str]
    nbytes: int
    turns: StoredTurns


NOTHING = Earlier([], [], 0, {})


def encode(
    response: bytes, items: bytes, chain: Sequence[str], before: int, *, turned: bool
) -> bytes:
    """A record of the response's JSON and that of its own items; `before` are the chain's bytes."""
    kept = {
        "response": orjson.Fragment(response),
        "input": orjson.Fragment(items),
        "chain": chain,
        "before": before,
        "nbytes": before + len(response) + len(items),
        "turned": turned,
    }
    return orjson.dumps(kept)


def decode(record: Record) -> Kept:
    found = orjson.loads(record.data)
    return Kept(*[found[name] for name in Kept._fields])


def dumped(given: Sequence[items.Item], param: str = "input") -> list[Item]:
    """A request's items as JSON. Raises UnsupportedParameter for what no chat is made of."""
    # A reference is to what was looked at when it was kept.
    told = [_SOMETHING if isinstance(item, items.ItemReference) else item for item in given]
    try:
        chat_messages(None, told, Toolset().flat)
    except UnsupportedParameter as error:
        where = (error.param or "").replace("input", param, 1)
        message = error.message.replace(error.param or "", where, 1)
        raise UnsupportedParameter(message, param=where) from None
    found: list[Item] = _ITEMS.dump_python([*given], exclude_none=True)
    return found


def written(given: Sequence[items.Item]) -> bytes:
    """As `dumped`, in bytes, of items that a chat was made of."""
    return _ITEMS.dump_json([*given], exclude_none=True)


def read(told: Sequence[Item]) -> list[items.Item]:
    """Return what was kept as items of a request.

    Raises InvalidRequest for what this release cannot read, which another one may have kept.
    """
    try:
        return _ITEMS.validate_python([*told])
    except ValidationError as error:
        problem = find_problem(error)
        raise InvalidRequest(
            f"conversation: this server cannot read a stored item: {join_path(problem.path)}: "
            f"{problem.words}. Start a new conversation.",
            param="conversation",
        ) from None


def is_response_id(text: str) -> bool:
    return _RESPONSE.fullmatch(text) is not None


def turns_id(response_id: str) -> str:
    """Of the record that has token ids of turns that were new in its prompt."""
    return f"{response_id}/turns"


def turns_record(response_id: str, turns: bytes) -> Record:
    """It goes with the response, whose group it is in."""
    return Record(turns_id(response_id), turns, FINISHED, response_id)


def response_of(item: str) -> str | None:
    """The id of the response that an item came with, if it came with one."""
    digits = _ITEM.fullmatch(item)
    return None if digits is None else f"resp_{digits[1]}"


def microseconds() -> int:
    """The time, as versions and places within a group have it. A float holds it exactly."""
    return time.time_ns() // 1000


def with_ids(given: Iterable[Item], owner: str) -> list[Item]:
    """The items in their long form, each with an id that holds the digits of `owner`, a response.

    Whatever theirs were: one that is sent again may be in this conversation already or in another
    one, where it is the record of its id, or may have been deleted.
    """
    digits = owner.partition("_")[2]
    return [
        item | {"id": item_id(item, digits, f"i{n}")}
        for n, item in enumerate(map(long_form, given))
    ]


def item_id(item: Item, digits: str, place: str) -> str:
    return f"{_PREFIXES[item['type']]}_{digits}_{place}"


def long_form(item: Item) -> Item:
    """As OpenAI lists it: with a status, and a message's text in parts."""
    item = item | {"status": "completed"}
    if item["type"] == "reasoning":
        return {"summary": []} | item
    if item["type"] == "message":
        part = _said if item["role"] == "assistant" else _given
        content = item["content"]
        texts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        item["content"] = [part(text) for text in texts]
    return item


def _given(part: Item) -> Item:
    return {"type": "input_text", "text": part["text"]}


def _said(part: Item) -> Item:
    if part["type"] == "refusal":
        return {"type": "refusal", "refusal": part["text"]}
    return {"type": "output_text", "text": part["text"], "annotations": []}


async def earlier(kept: Conversations, tenant: str, response_id: str, intake: Intake) -> Earlier:
    """What follows `response_id`, off the event loop and in the tenant's turn where it is large.

    Raises PreviousResponseNotFound where it, or one before it, is not there any more, and
    InvalidRequest where it cannot be continued.
    """
    [last] = await kept.get(tenant, [response_id])
    if last is None or not is_response_id(response_id):
        raise PreviousResponseNotFound(response_id)
    await intake.reserve_history(len(last.data))
    found = await intake.work(lambda: decode(last))
    _check_continuable(found, response_id)
    await intake.reserve_history(found.nbytes)
    records = []
    for link, record in zip(found.chain, await kept.get(tenant, found.chain), strict=True):
        if record is None:
            raise PreviousResponseNotFound(link)
        records.append(record)

    def whole() -> tuple[list[Item], list[str]]:
        every = [*map(decode, records), found]
        turned = [link for link, one in zip(chain, every, strict=True) if one.turned]
        return [item for one in every for item in one.items], turned

    chain = [*found.chain, response_id]
    items, turned = await intake.work(whole)
    turns = await known_turns(kept, tenant, turned, found.nbytes, intake)
    return Earlier(items, chain, found.nbytes, turns)


async def known_turns(
    kept: Conversations, tenant: str, responses: Iterable[str], nbytes: int, intake: Intake
) -> StoredTurns:
    """Those of the prompts of these, beside `nbytes` of what else is here for the request.

    To go without them costs time and nothing else.
    """
    try:
        records = await kept.get(tenant, [turns_id(one) for one in responses], patient=False)
        packed = [record.data for record in records if record is not None]
        await intake.reserve_history(nbytes + sum(map(len, packed)))
        return await intake.work(lambda: turn_record.unpack(b"".join(packed)))
    except (ConversationTooLarge, ConversationsUnavailable, ValueError):
        return {}


def _check_continuable(found: Kept, response_id: str) -> None:
    status = found.response["status"]
    if status not in _CONTINUABLE:
        raise InvalidRequest(
            f"previous_response_id: {response_id} is {status}; allowed: one that is "
            f"{' or '.join(_CONTINUABLE)}.",
            param="previous_response_id",
        )
    if len(found.chain) >= LONGEST_CHAIN - 1:
        raise InvalidRequest(
            f"previous_response_id: {response_id} follows {len(found.chain)} others; allowed: "
            f"{LONGEST_CHAIN - 2}. Begin anew with what matters of them as input.",
            param="previous_response_id",
        )


async def resolved(
    kept: Conversations,
    tenant: str,
    given: list[Item],
    intake: Intake,
    param: str = "input",
    nbytes: int = 0,
) -> list[Item]:
    """The items with what their references name in the place of those.

    What is named counts as often as it is named, beside `nbytes` of what else comes before the
    request: each time it is a part of the prompt, and of what is kept. Raises NotFound for what
    this tenant has no item of, and ConversationTooLarge.
    """
    wanted = [item["id"] for item in given if item["type"] == "item_reference"]
    if not wanted:
        return given
    if len(wanted) > _MOST_REFERENCES:
        raise InvalidRequest(
            f"{param}: found {len(wanted)} items of type item_reference; allowed: "
            f"{_MOST_REFERENCES}.",
            param=param,
        )
    # An item of a response is in that one's record; one of a conversation is a record itself.
    ids = dict.fromkeys(
        name
        for one in wanted
        if (response := response_of(one)) is not None
        for name in (response, one)
    )

    def replaced(records: Sequence[Record]) -> tuple[list[Item], int] | str:
        """And the bytes of what was named; or the id of one that there is not."""
        found: dict[str, Item] = {}
        for record in records:
            if is_response_id(record.id):
                found |= {item["id"]: item for item in decode(record).items}
            else:
                item = orjson.loads(record.data)
                found[item["id"]] = item
        missing: str | None = next((one for one in wanted if one not in found), None)
        if missing is not None:
            return missing
        items = [item if item["type"] != "item_reference" else found[item["id"]] for item in given]
        times = Counter(wanted).items()
        return items, sum([len(orjson.dumps(found[one])) * count for one, count in times])

    # Of each two names there is one: only where there is neither is there something to wait for.
    for patient in (False, True):
        records = await kept.get(tenant, [*ids], patient=patient)
        there = [record for record in records if record is not None]
        await intake.reserve_history(sum([len(record.data) for record in there]))
        answer = await intake.work(partial(replaced, there))
        if not isinstance(answer, str):
            items, named = answer
            await intake.reserve_history(nbytes + named)
            return items
    raise NotFound(f"Item with id '{answer}' not found.", param=param)

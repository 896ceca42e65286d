"""Format of stored responses, and loading of the history that a request continues.

The record of a response contains the items that were new in this response, and the ids of the
earlier responses. So loading a conversation takes two reads: the last response, then all earlier
responses at once. An item's id contains the id of the response or conversation with which the item
was stored, so a referenced item is found without an index.

See decision 070 in docs/decisions.
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
from gateway.api.responses.item_messages import build_chat_messages
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
"""An input or output item, as JSON."""
_ITEMS = TypeAdapter(list[items.Item])
_PLACEHOLDER = items.MessageItem(role="user", content="")

FINISHED = FINAL
"""The lowest `Record.version` of a record that cannot change any more.

Records that may still change have lower versions. An unfinished response has the version 1. The
other changeable records have the time of their last change in microseconds.
"""
MAX_CHAIN_RESPONSES = 1024
MAX_EARLIER_ITEMS = 8192
"""Maximum number of stored items before a request's own items."""
_MAX_REFERENCES = 64

_RESPONSE = re.compile(r"resp_[0-9a-f]{32}")
_ITEM = re.compile(r"[a-z]{2,4}_([0-9a-f]{32})_i?[0-9]{1,20}")
_ID_PREFIXES = {
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


class StoredResponse(NamedTuple):
    """A response as it is stored. The names of the fields are the keys of the stored JSON.

    Attributes:
        response: The response object as the client received it.
        input: The request's own new items.
        chain: The ids of the earlier responses, oldest first.
        before: The total size in bytes of the earlier responses' records.
        nbytes: `before` plus the bytes of this record.
        turned: True if the record `turns_id` exists. It has the token ids of those parts of the
            prompt that no earlier response has stored.
    """

    response: dict[str, Any]
    input: list[Item]
    chain: list[str]
    before: int
    nbytes: int
    turned: bool

    @property
    def items(self) -> list[Item]:
        """The items that this response adds to the history: the request's items and the output."""
        output: list[Item] = self.response["output"]
        return self.input + output


class ConversationHistory(NamedTuple):
    """The stored items and token ids that precede the items of a request.

    Attributes:
        items: The earlier items, oldest first.
        chain: The ids of the earlier responses; empty in a conversation.
        nbytes: The total size in bytes of the earlier records.
        turns: The stored token ids of earlier turns.
    """

    items: list[Item]
    chain: list[str]
    nbytes: int
    turns: StoredTurns


EMPTY_HISTORY = ConversationHistory([], [], 0, {})


def encode(
    response: bytes, items: bytes, chain: Sequence[str], before: int, *, turned: bool
) -> bytes:
    """Encode the record of a response.

    Args:
        response: The response object as JSON.
        items: The request's own items as JSON.
        chain: The ids of the earlier responses.
        before: The total bytes of the chain's records.
        turned: True if token ids are stored beside the response.
    """
    fields = {
        "response": orjson.Fragment(response),
        "input": orjson.Fragment(items),
        "chain": chain,
        "before": before,
        "nbytes": before + len(response) + len(items),
        "turned": turned,
    }
    return orjson.dumps(fields)


def decode(record: Record) -> StoredResponse:
    found = orjson.loads(record.data)
    return StoredResponse(*[found[name] for name in StoredResponse._fields])


def dump_items(given: Sequence[items.Item], param: str = "input") -> list[Item]:
    """Return a request's items as JSON. Raise UnsupportedParameter for an item that a chat cannot
    contain."""
    # Check a placeholder for each reference: a referenced item was validated when it was stored.
    chat_items = [_PLACEHOLDER if isinstance(item, items.ItemReference) else item for item in given]
    try:
        build_chat_messages(None, chat_items, Toolset().flatten_name)
    except UnsupportedParameter as error:
        where = (error.param or "").replace("input", param, 1)
        message = error.message.replace(error.param or "", where, 1)
        raise UnsupportedParameter(message, param=where) from None
    found: list[Item] = _ITEMS.dump_python([*given], exclude_none=True)
    return found


def dump_items_json(given: Sequence[items.Item]) -> bytes:
    """Return items as JSON bytes.

    The items are not checked here, because a chat was already built from them.
    """
    return _ITEMS.dump_json([*given], exclude_none=True)


def parse_items(stored: Sequence[Item]) -> list[items.Item]:
    """Parse stored items.

    Raise InvalidRequest for an item that this release cannot read. Another release of the gateway
    may have stored such an item.
    """
    try:
        return _ITEMS.validate_python([*stored])
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
    """Return the id of the record with the token ids that are stored for a response."""
    return f"{response_id}/turns"


def build_turns_record(response_id: str, turns: bytes) -> Record:
    """Build the record with the token ids `turns`.

    The record expires together with the response.
    """
    return Record(turns_id(response_id), turns, FINISHED, response_id)


def response_id_of(item: str) -> str | None:
    """Return the id of the response that contains an item. `item` is the item's id.

    Return None if `item` cannot be the id of a stored item. If the client itself added the item to
    a conversation, no response has the returned id.
    """
    digits = _ITEM.fullmatch(item)
    return None if digits is None else f"resp_{digits[1]}"


def now_us() -> int:
    """Return the time in microseconds since 1970, for use as `Record.version` or `Record.order`.

    The number is below 2**53. So Redis' Lua scripts, which compute with floats, represent it
    exactly.
    """
    return time.time_ns() // 1000


def assign_ids(given: Iterable[Item], owner: str) -> list[Item]:
    """Return the items as they are stored: with new ids, and with all fields of OpenAI's format.

    `to_long_form` adds the missing fields. The new ids contain the digits of the response id
    `owner`. Ids that the client sent are not used: a record with such an id may exist already, or
    may have been deleted.
    """
    digits = owner.partition("_")[2]
    return [
        item | {"id": build_item_id(item, digits, f"i{n}")}
        for n, item in enumerate(map(to_long_form, given))
    ]


def build_item_id(item: Item, digits: str, number: str) -> str:
    return f"{_ID_PREFIXES[item['type']]}_{digits}_{number}"


def to_long_form(item: Item) -> Item:
    """Return an item with the fields that OpenAI adds when it lists items.

    The item gets a status. The text of a message becomes a list of text parts.
    """
    item = item | {"status": "completed"}
    if item["type"] == "reasoning":
        return {"summary": []} | item
    if item["type"] == "message":
        part = _output_part if item["role"] == "assistant" else _input_part
        content = item["content"]
        texts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        item["content"] = [part(text) for text in texts]
    return item


def _input_part(part: Item) -> Item:
    return {"type": "input_text", "text": part["text"]}


def _output_part(part: Item) -> Item:
    if part["type"] == "refusal":
        return {"type": "refusal", "refusal": part["text"]}
    return {"type": "output_text", "text": part["text"], "annotations": []}


async def load_history(
    conversations: Conversations, tenant: str, response_id: str, intake: Intake
) -> ConversationHistory:
    """Load the items of the response `response_id` and of all responses before it.

    Large records are decoded in a thread, with fair scheduling by tenant.

    Raises:
        PreviousResponseNotFound: The response, or one before it, does not exist any more.
        InvalidRequest: The response cannot be continued.
    """
    [last] = await conversations.get(tenant, [response_id])
    if last is None or not is_response_id(response_id):
        raise PreviousResponseNotFound(response_id)
    await intake.reserve_history(len(last.data))
    found = await intake.work(lambda: decode(last))
    _check_continuable(found, response_id)
    await intake.reserve_history(found.nbytes)
    records = []
    for link, record in zip(found.chain, await conversations.get(tenant, found.chain), strict=True):
        if record is None:
            raise PreviousResponseNotFound(link)
        records.append(record)

    def decode_all() -> tuple[list[Item], list[str]]:
        every = [*map(decode, records), found]
        turned = [link for link, one in zip(chain, every, strict=True) if one.turned]
        return [item for one in every for item in one.items], turned

    chain = [*found.chain, response_id]
    items, turned = await intake.work(decode_all)
    turns = await load_turns(conversations, tenant, turned, found.nbytes, intake)
    return ConversationHistory(items, chain, found.nbytes, turns)


async def load_turns(
    conversations: Conversations, tenant: str, responses: Iterable[str], nbytes: int, intake: Intake
) -> StoredTurns:
    """Return the token ids that are stored for the prompts of these responses.

    Return {} if the records cannot be read. The prompt is then tokenized again, which only costs
    time. `nbytes` is the size in bytes of the earlier items. The request already holds a share of
    the memory budget for these bytes.
    """
    try:
        records = await conversations.get(
            tenant, [turns_id(one) for one in responses], patient=False
        )
        packed = [record.data for record in records if record is not None]
        await intake.reserve_history(nbytes + sum(map(len, packed)))
        return await intake.work(lambda: turn_record.unpack(b"".join(packed)))
    except (ConversationTooLarge, ConversationsUnavailable, ValueError):
        return {}


def _check_continuable(found: StoredResponse, response_id: str) -> None:
    status = found.response["status"]
    if status not in _CONTINUABLE:
        raise InvalidRequest(
            f"previous_response_id: {response_id} is {status}; allowed: one that is "
            f"{' or '.join(_CONTINUABLE)}.",
            param="previous_response_id",
        )
    if len(found.chain) >= MAX_CHAIN_RESPONSES - 1:
        raise InvalidRequest(
            f"previous_response_id: {response_id} follows {len(found.chain)} others; allowed: "
            f"{MAX_CHAIN_RESPONSES - 2}. Begin anew with what matters of them as input.",
            param="previous_response_id",
        )


async def resolve_references(
    conversations: Conversations,
    tenant: str,
    given: list[Item],
    intake: Intake,
    param: str = "input",
    nbytes: int = 0,
) -> list[Item]:
    """Return the items with each reference replaced by the item that it names.

    Memory is reserved for the referenced items and for `nbytes` bytes of earlier items. If several
    references name the same item, its bytes are counted for each of them, because the prompt and
    the stored record contain the item several times.

    Raises:
        NotFound: The tenant has no item of that id.
        InvalidRequest: The request has too many references.
        ConversationTooLarge: The records are too large to be read at once.
    """
    wanted = [item["id"] for item in given if item["type"] == "item_reference"]
    if not wanted:
        return given
    if len(wanted) > _MAX_REFERENCES:
        raise InvalidRequest(
            f"{param}: found {len(wanted)} items of type item_reference; allowed: "
            f"{_MAX_REFERENCES}.",
            param=param,
        )
    # An item may be stored in the record of its response. If the item belongs to a conversation, it
    # is also a record itself. The item's id does not show which of them exists, so read both.
    ids = dict.fromkeys(
        name
        for one in wanted
        if (response := response_id_of(one)) is not None
        for name in (response, one)
    )

    def replace_references(records: Sequence[Record]) -> tuple[list[Item], int] | str:
        """Return the items and the total bytes of the referenced items.

        If an item is missing, return its id instead.
        """
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

    # For most items, one of the two records is missing. The store waits long for a missing record,
    # because another gateway may not have uploaded it yet. So first read without waiting. Wait only
    # if an item was not found.
    for patient in (False, True):
        records = await conversations.get(tenant, [*ids], patient=patient)
        available = [record for record in records if record is not None]
        await intake.reserve_history(sum([len(record.data) for record in available]))
        result = await intake.work(partial(replace_references, available))
        if not isinstance(result, str):
            items, named = result
            await intake.reserve_history(nbytes + named)
            return items
    raise NotFound(f"Item with id '{result}' not found.", param=param)

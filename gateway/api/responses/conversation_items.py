"""Reading and adding of the items of a stored conversation.

Each item is a separate record of the store. So two gateways can add items at the same time without
overwriting each other's items.

A conversation's records are sorted by the number `Record.order`. For an item, this number is the
time of arrival in microseconds. If a gateway's clock is slow, this time may be before the time of
the conversation's last item. The new item then gets the last item's number plus one.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import AsyncIterator, Sequence
from typing import Any, NamedTuple

import orjson

from gateway.api.intake import Intake
from gateway.api.responses.stored import (
    MAX_EARLIER_ITEMS,
    ConversationHistory,
    Item,
    build_item_id,
    load_turns,
    now_us,
    response_id_of,
    to_long_form,
)
from gateway.conversations.record import FINAL, GROWING_PREFIX, Record
from gateway.conversations.store import Conversations
from gateway.errors import ConversationTooLarge, InvalidRequest, NotFound

_CONVERSATION = re.compile(GROWING_PREFIX + r"[0-9a-f]{32}")
# Number of items to read at once. The first page is small, because the size of the items is not
# known yet. Each further page may have the maximum number.
_FIRST_PAGE_ITEMS, _PAGE_ITEMS = 16, 1000


class ConversationHead(NamedTuple):
    """The creation time and the client's metadata of a conversation.

    Attributes:
        fields: `created_at` and `metadata`, as the client gets them.
        began_ms: the value of `Conversations.redis_time_ms` when the conversation was created.
    """

    fields: dict[str, Any]
    began_ms: int


async def load_head(
    conversations: Conversations, tenant: str, conversation: str, param: str | None = None
) -> ConversationHead:
    """Return a conversation's metadata. Raise NotFound if the conversation does not exist."""
    [record] = await conversations.get(tenant, [conversation])
    if record is None or not is_conversation(conversation):
        raise NotFound(f"Conversation with id '{conversation}' not found.", param=param)
    return ConversationHead(orjson.loads(record.data), record.order)


def is_conversation(text: str) -> bool:
    return _CONVERSATION.fullmatch(text) is not None


def build_head_record(conversation: str, head: ConversationHead) -> Record:
    data = orjson.dumps(head.fields)
    return Record(conversation, data, version=now_us(), order=head.began_ms)


def build_item_records(conversation: str, items: Sequence[Item], last: int) -> list[Record]:
    """Build the records of items that already have ids.

    `last` is the `Record.order` of the conversation's last item. The new items get higher values.
    """
    order = max(now_us(), last + 1)
    return [
        Record(item["id"], orjson.dumps(item), version=FINAL, group=conversation, order=order + n)
        for n, item in enumerate(items)
    ]


async def add_items(
    conversations: Conversations,
    tenant: str,
    conversation: str,
    items: Sequence[Item],
    intake: Intake,
) -> list[Item]:
    """Add items to a conversation, and return them as they are stored.

    `to_long_form` adds the fields that a client may leave out. Each item gets a new id, even if the
    client sent an id.
    """
    digits, now = conversation.partition("_")[2], now_us()
    # Two gateways may add items in the same microsecond. A random part makes their ids different.
    number = now * 10_000 + secrets.randbelow(5_000)
    later = await conversations.members(tenant, conversation, after=now)
    last = later[-1].order if later else -1

    def build_records() -> tuple[list[Item], list[Record]]:
        added = [
            to_long_form(item) | {"id": build_item_id(item, digits, str(number + n))}
            for n, item in enumerate(items)
        ]
        return added, build_item_records(conversation, added, last)

    added, records = await intake.work(build_records)
    await conversations.put(tenant, records)
    return added


async def load_item(
    conversations: Conversations, tenant: str, conversation: str, item: str
) -> bytes:
    """Return an item's JSON. Raise NotFound if the conversation has no such item."""
    [record] = await conversations.get(tenant, [item])
    if record is None or record.group != conversation:
        raise NotFound(f"Item with id '{item}' not found.")
    return record.data


async def delete_conversation(conversations: Conversations, tenant: str, conversation: str) -> None:
    """Delete a conversation with all its items, regardless of their number and size.

    An interrupted deletion can be repeated. Raise NotFound if neither the conversation nor an item
    of it exists.
    """
    try:
        await load_head(conversations, tenant, conversation)
    except NotFound:
        if not is_conversation(conversation) or not await conversations.members(
            tenant, conversation, limit=1, require_complete=False
        ):
            raise
    else:
        # Delete the conversation's own record before its items. Other requests then no longer find
        # the conversation, so they cannot add items during the deletion.
        await conversations.delete(tenant, [conversation])
    limit = _PAGE_ITEMS
    while True:
        try:
            found = await conversations.members(
                tenant, conversation, limit=limit, require_complete=False
            )
        except ConversationTooLarge:
            if limit == 1:
                raise
            limit = max(1, limit // _FIRST_PAGE_ITEMS)
            continue
        if not found:
            return
        await conversations.delete(tenant, [record.id for record in found])


async def iter_pages(
    conversations: Conversations, tenant: str, conversation: str
) -> AsyncIterator[list[Record]]:
    """Yield all items of a conversation in pages, oldest first.

    Raise InvalidRequest if the conversation has too many items.
    """
    count, limit, after = 0, _FIRST_PAGE_ITEMS, -1
    while found := await conversations.members(tenant, conversation, after=after, limit=limit):
        count += len(found)
        if count > MAX_EARLIER_ITEMS:
            raise InvalidRequest(
                f"{conversation} has more than {MAX_EARLIER_ITEMS} items; begin another one.",
                param="conversation",
            )
        yield found
        after, limit = found[-1].order, _PAGE_ITEMS


async def load_conversation(
    conversations: Conversations, tenant: str, conversation: str, intake: Intake
) -> tuple[ConversationHistory, int]:
    """Load all items of a conversation as the history of a request.

    Also return the `Record.order` of the last item, or -1 if the conversation has no items.

    Large histories are decoded in a thread, with fair scheduling by tenant. Raise InvalidRequest if
    the conversation has too many items. Raise ConversationTooLarge if the items exceed the maximum
    size of a request body.
    """
    data: list[bytes] = []
    nbytes, last = 0, -1
    async for page in iter_pages(conversations, tenant, conversation):
        data += [record.data for record in page]
        nbytes, last = nbytes + sum([len(record.data) for record in page]), page[-1].order
        await intake.reserve_history(nbytes)
    items: list[Item] = await intake.work(lambda: orjson.loads(b"[" + b",".join(data) + b"]"))
    responses = dict.fromkeys(one for item in items if (one := response_id_of(item["id"])))
    turns = await load_turns(conversations, tenant, responses, nbytes, intake)
    return ConversationHistory(items, [], nbytes, turns), last

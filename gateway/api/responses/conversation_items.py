"""What is in a conversation, read and added to.

Each item is a record by itself, so that whoever adds one writes nothing that others have written.
Its place is the time at which it came, in microseconds, or the next one behind the last that is
there: a gateway whose clock is behind puts nothing before what it has answered.
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
# As many are read at a time while it is not known how large they are, and at most.
_FIRST_PAGE_ITEMS, _PAGE_ITEMS = 16, 1000


class ConversationHead(NamedTuple):
    """What a conversation is called by.

    Attributes:
        told: `created_at` and `metadata`.
        began: `Conversations.time` when it was created.
    """

    fields: dict[str, Any]
    began_ms: int


async def load_head(
    conversations: Conversations, tenant: str, conversation: str, param: str | None = None
) -> ConversationHead:
    """Raises NotFound."""
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
    """To be put: the items, which have ids, behind the place `last`."""
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
    """As they are then there: in their long form, with ids that are new, whatever theirs were."""
    digits, now = conversation.partition("_")[2], now_us()
    # Of one microsecond there may be several at other gateways.
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
    """Its JSON. Raises NotFound."""
    [record] = await conversations.get(tenant, [item])
    if record is None or record.group != conversation:
        raise NotFound(f"Item with id '{item}' not found.")
    return record.data


async def delete_conversation(conversations: Conversations, tenant: str, conversation: str) -> None:
    """The conversation and its items, however many and large they are.

    What a deletion that ended midway has left can be deleted again. Raises NotFound.
    """
    try:
        await load_head(conversations, tenant, conversation)
    except NotFound:
        if not is_conversation(conversation) or not await conversations.members(
            tenant, conversation, limit=1, require_complete=False
        ):
            raise
    else:
        # First, so that nobody adds to what is being taken away.
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
    """All items, oldest first. Raises InvalidRequest where there are too many to be read."""
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
    """What a response in the conversation goes on from, and the place of the last item.

    Off the event loop and in the tenant's turn where it is large. Raises InvalidRequest for what is
    larger than a request's body may be.
    """
    data: list[bytes] = []
    nbytes, last = 0, -1
    async for page in iter_pages(conversations, tenant, conversation):
        data += [record.data for record in page]
        nbytes, last = nbytes + sum([len(record.data) for record in page]), page[-1].order
        await intake.make_room(nbytes)
    items: list[Item] = await intake.work(lambda: orjson.loads(b"[" + b",".join(data) + b"]"))
    responses = dict.fromkeys(one for item in items if (one := response_id_of(item["id"])))
    turns = await load_turns(conversations, tenant, responses, nbytes, intake)
    return ConversationHistory(items, [], nbytes, turns), last

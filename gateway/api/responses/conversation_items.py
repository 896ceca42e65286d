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
    MOST_ITEMS,
    Earlier,
    Item,
    item_id,
    known_turns,
    long_form,
    microseconds,
    response_of,
)
from gateway.conversations.record import FINAL, GROWING, Record
from gateway.conversations.store import Conversations
from gateway.errors import ConversationTooLarge, InvalidRequest, NotFound

_CONVERSATION = re.compile(GROWING + r"[0-9a-f]{32}")
# As many are read at a time while it is not known how large they are, and at most.
_FEW, _MANY = 16, 1000


class Head(NamedTuple):
    """What a conversation is called by.

    Attributes:
        told: `created_at` and `metadata`.
        began: `Conversations.time` when it was created.
    """

    told: dict[str, Any]
    began: int


async def head_of(
    kept: Conversations, tenant: str, conversation: str, param: str | None = None
) -> Head:
    """Raises NotFound."""
    [record] = await kept.get(tenant, [conversation])
    if record is None or not is_conversation(conversation):
        raise NotFound(f"Conversation with id '{conversation}' not found.", param=param)
    return Head(orjson.loads(record.data), record.order)


def is_conversation(text: str) -> bool:
    return _CONVERSATION.fullmatch(text) is not None


def head_record(conversation: str, head: Head) -> Record:
    data = orjson.dumps(head.told)
    return Record(conversation, data, version=microseconds(), order=head.began)


def item_records(conversation: str, items: Sequence[Item], last: int) -> list[Record]:
    """To be put: the items, which have ids, behind the place `last`."""
    place = max(microseconds(), last + 1)
    return [
        Record(item["id"], orjson.dumps(item), version=FINAL, group=conversation, order=place + n)
        for n, item in enumerate(items)
    ]


async def add_items(
    kept: Conversations, tenant: str, conversation: str, items: Sequence[Item], intake: Intake
) -> list[Item]:
    """As they are then there: in their long form, with ids that are new, whatever theirs were."""
    digits, now = conversation.partition("_")[2], microseconds()
    # Of one microsecond there may be several at other gateways.
    place = now * 10_000 + secrets.randbelow(5_000)
    later = await kept.members(tenant, conversation, after=now)
    last = later[-1].order if later else -1

    def made() -> tuple[list[Item], list[Record]]:
        added = [
            long_form(item) | {"id": item_id(item, digits, str(place + n))}
            for n, item in enumerate(items)
        ]
        return added, item_records(conversation, added, last)

    added, records = await intake.work(made)
    await kept.put(tenant, records)
    return added


async def item_of(kept: Conversations, tenant: str, conversation: str, item: str) -> bytes:
    """Its JSON. Raises NotFound."""
    [record] = await kept.get(tenant, [item])
    if record is None or record.group != conversation:
        raise NotFound(f"Item with id '{item}' not found.")
    return record.data


async def delete_all(kept: Conversations, tenant: str, conversation: str) -> None:
    """The conversation and its items, however many and large they are.

    What a deletion that ended midway has left can be deleted again. Raises NotFound.
    """
    try:
        await head_of(kept, tenant, conversation)
    except NotFound:
        if not is_conversation(conversation) or not await kept.members(
            tenant, conversation, limit=1, whole=False
        ):
            raise
    else:
        # First, so that nobody adds to what is being taken away.
        await kept.delete(tenant, [conversation])
    limit = _MANY
    while True:
        try:
            found = await kept.members(tenant, conversation, limit=limit, whole=False)
        except ConversationTooLarge:
            if limit == 1:
                raise
            limit = max(1, limit // _FEW)
            continue
        if not found:
            return
        await kept.delete(tenant, [record.id for record in found])


async def pages(kept: Conversations, tenant: str, conversation: str) -> AsyncIterator[list[Record]]:
    """All items, oldest first. Raises InvalidRequest where there are too many to be read."""
    count, limit, after = 0, _FEW, -1
    while found := await kept.members(tenant, conversation, after=after, limit=limit):
        count += len(found)
        if count > MOST_ITEMS:
            raise InvalidRequest(
                f"{conversation} has more than {MOST_ITEMS} items; begin another one.",
                param="conversation",
            )
        yield found
        after, limit = found[-1].order, _MANY


async def all_items(
    kept: Conversations, tenant: str, conversation: str, intake: Intake
) -> tuple[Earlier, int]:
    """What a response in the conversation goes on from, and the place of the last item.

    Off the event loop and in the tenant's turn where it is large. Raises InvalidRequest for what is
    larger than a request's body may be.
    """
    data: list[bytes] = []
    nbytes, last = 0, -1
    async for page in pages(kept, tenant, conversation):
        data += [record.data for record in page]
        nbytes, last = nbytes + sum([len(record.data) for record in page]), page[-1].order
        await intake.reserve_history(nbytes)
    items: list[Item] = await intake.work(lambda: orjson.loads(b"[" + b",".join(data) + b"]"))
    responses = dict.fromkeys(one for item in items if (one := response_of(item["id"])))
    turns = await known_turns(kept, tenant, responses, nbytes, intake)
    return Earlier(items, [], nbytes, turns), last

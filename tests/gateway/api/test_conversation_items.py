"""Deletion of conversations whose items are too many or too large to be read."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.api.responses.conversation_items import (
    ConversationHead,
    build_head_record,
    delete_conversation,
)
from gateway.api.responses.stored import MAX_EARLIER_ITEMS
from gateway.conversations.record import MAX_MEMBERS, MAX_READ_BYTES, Record
from gateway.conversations.store import Conversations
from gateway.errors import NotFound

CONVERSATION = "conv_" + "0" * 32


def _item(number: int, size: int) -> Record:
    return Record(f"msg_{number}", b"x" * size, 1, CONVERSATION, number)


@pytest.mark.parametrize(
    ("count", "size"), [(MAX_MEMBERS - 1, 1), (5, MAX_READ_BYTES // 4)], ids=["many", "large"]
)
async def test_what_cannot_be_read_is_deleted(tmp_path: Path, count: int, size: int) -> None:
    assert count > MAX_EARLIER_ITEMS or count * size > MAX_READ_BYTES
    items = [_item(number, size) for number in range(count)]
    async with Conversations(tmp_path, ttl_s=1000, tenant_bytes=2**28) as kept:
        await kept.put("t", [build_head_record(CONVERSATION, ConversationHead({}, 0))])
        each = count if size == 1 else 1
        for start in range(0, count, each):
            await kept.put("t", items[start : start + each])
        with pytest.raises(NotFound):
            await delete_conversation(kept, "another", CONVERSATION)
        await delete_conversation(kept, "t", CONVERSATION)
        for number in (0, count // 2, count - 1):
            assert await kept.get("t", [f"msg_{number}"]) == [None]
        with pytest.raises(NotFound):
            await delete_conversation(kept, "t", CONVERSATION)


async def test_a_deletion_that_ended_midway_is_ended_by_the_next(tmp_path: Path) -> None:
    async with Conversations(tmp_path, ttl_s=1000, tenant_bytes=2**28) as kept:
        await kept.put("t", [build_head_record(CONVERSATION, ConversationHead({}, 0)), _item(1, 1)])
        await kept.delete("t", [CONVERSATION])
        await delete_conversation(kept, "t", CONVERSATION)
        assert await kept.get("t", ["msg_1"]) == [None]


async def test_only_conversations_are_deleted_as_such(tmp_path: Path) -> None:
    async with Conversations(tmp_path, ttl_s=1000, tenant_bytes=2**28) as kept:
        await kept.put("t", [Record("resp_1", b"x"), Record("resp_1/beat", b"x", 1, "resp_1")])
        with pytest.raises(NotFound):
            await delete_conversation(kept, "t", "resp_1")
        assert None not in await kept.get("t", ["resp_1", "resp_1/beat"])

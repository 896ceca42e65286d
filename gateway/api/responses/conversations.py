"""Conversations as objects of their own: /v1/conversations, and the items in them."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Literal

import orjson
from fastapi import Request
from pydantic import BaseModel, Field
from starlette.responses import Response

from gateway.api.answer_schemas import Count, Described
from gateway.api.messages import Strict
from gateway.api.plain_requests import read_plain
from gateway.api.responses import items
from gateway.api.responses.conversation_items import (
    Head,
    add_items,
    delete_all,
    head_of,
    head_record,
    item_of,
    pages,
)
from gateway.api.responses.lists import PAGE, ItemList, Page, listed, page_of
from gateway.api.responses.looks import Asking, asking
from gateway.api.responses.options import Metadata
from gateway.api.responses.stored import Item, dumped, resolved
from gateway.api.routing import BODY, ApiRouter, Name, Schema, needs, refusals

router = ApiRouter()

NewItems = Annotated[list[items.Item], Field(fail_fast=True, max_length=20)]


class NewConversation(Strict):
    items: NewItems | None = None
    metadata: Metadata | None = None


class ChangedConversation(Strict):
    metadata: Metadata | None


class AddedItems(Strict):
    items: NewItems


class Conversation(Strict):
    id: str
    object: Literal["conversation"] = "conversation"
    created_at: Count
    metadata: dict[str, str]


class ConversationDeleted(Strict):
    id: str
    object: Literal["conversation.deleted"] = "conversation.deleted"
    deleted: Literal[True] = True


class ConversationItem(Described):
    """One of input or output, as a response has it."""

    id: str
    type: str


def _described(model: type[BaseModel], *, body: type[Strict] | None = None, **more: Any) -> Schema:
    """What the document says of an operation that answers with `model`."""
    refused = refusals(*(BODY if body else (400,)), 401, 404, 413, 429, 503)
    extra = needs("api_key", optional=True, json=body, **more)
    return {"response_model": model, "responses": refused, "openapi_extra": extra}


@router.post(
    "/v1/conversations",
    summary="Begins a conversation.",
    **_described(Conversation, body=NewConversation, empty=True),
)
async def create(request: Request) -> Response:
    async with asking(request, counted=True) as ask:
        wanted, headers = await read_plain(request, ask.intake, NewConversation)
        conversation = f"conv_{secrets.token_hex(16)}"
        told = {"created_at": int(time.time()), "metadata": wanted.metadata or {}}
        head = Head(told, ask.kept.time)
        await ask.kept.put(ask.tenant, [head_record(conversation, head)])
        if wanted.items:
            await _add(ask, conversation, wanted.items)
        return _told(conversation, head, headers)


@router.get(
    "/v1/conversations/{conversation_id}",
    summary="A conversation, without its items.",
    **_described(Conversation),
)
async def retrieve(request: Request, conversation_id: Name) -> Response:
    async with asking(request) as ask, ask.look:
        return _told(conversation_id, await head_of(ask.kept, ask.tenant, conversation_id))


@router.post(
    "/v1/conversations/{conversation_id}",
    summary="Gives a conversation other metadata.",
    **_described(Conversation, body=ChangedConversation),
)
async def update(request: Request, conversation_id: Name) -> Response:
    async with asking(request, counted=True) as ask:
        wanted, headers = await read_plain(request, ask.intake, ChangedConversation)
        async with ask.look:
            head = await head_of(ask.kept, ask.tenant, conversation_id)
            head.told["metadata"] = wanted.metadata or {}
            await ask.kept.put(ask.tenant, [head_record(conversation_id, head)])
        return _told(conversation_id, head, headers)


@router.delete(
    "/v1/conversations/{conversation_id}",
    summary="Deletes a conversation, and the items in it.",
    **_described(ConversationDeleted),
)
async def delete(request: Request, conversation_id: Name) -> Response:
    async with asking(request) as ask, ask.look:
        await delete_all(ask.kept, ask.tenant, conversation_id)
        return _json(ConversationDeleted(id=conversation_id))


@router.post(
    "/v1/conversations/{conversation_id}/items",
    summary="Adds items to a conversation.",
    **_described(ItemList, body=AddedItems),
)
async def add(request: Request, conversation_id: Name) -> Response:
    async with asking(request, counted=True) as ask:
        wanted, headers = await read_plain(request, ask.intake, AddedItems)
        async with ask.look:
            await head_of(ask.kept, ask.tenant, conversation_id)
        added = await _add(ask, conversation_id, wanted.items)
        return _bytes(await ask.intake.work(partial(listed, added)), headers)


@router.get(
    "/v1/conversations/{conversation_id}/items",
    summary="The items of a conversation, a page at a time.",
    **_described(ItemList, query=PAGE),
)
async def list_items(request: Request, conversation_id: Name) -> Response:
    wanted = page_of(request)
    async with asking(request) as ask, ask.look:
        await head_of(ask.kept, ask.tenant, conversation_id)
        data: list[bytes] = []
        async for page in pages(ask.kept, ask.tenant, conversation_id):
            data += [record.data for record in page]
            await ask.intake.reserve_history(sum(map(len, data)))
        return _bytes(await ask.intake.work(partial(_page, wanted, data)))


@router.get(
    "/v1/conversations/{conversation_id}/items/{item_id}",
    summary="One item of a conversation.",
    **_described(ConversationItem),
)
async def retrieve_item(request: Request, conversation_id: Name, item_id: Name) -> Response:
    async with asking(request) as ask, ask.look:
        return _bytes(await item_of(ask.kept, ask.tenant, conversation_id, item_id))


@router.delete(
    "/v1/conversations/{conversation_id}/items/{item_id}",
    summary="Takes an item out of a conversation, and deletes it.",
    **_described(Conversation),
)
async def delete_item(request: Request, conversation_id: Name, item_id: Name) -> Response:
    async with asking(request) as ask, ask.look:
        head = await head_of(ask.kept, ask.tenant, conversation_id)
        await item_of(ask.kept, ask.tenant, conversation_id, item_id)
        await ask.kept.delete(ask.tenant, [item_id])
        return _told(conversation_id, head)


async def _add(ask: Asking, conversation: str, new: Sequence[items.Item]) -> list[Item]:
    async with ask.look:
        given = await ask.intake.work(partial(dumped, new, "items"))
        found = await resolved(ask.kept, ask.tenant, given, ask.intake, "items")
        return await add_items(ask.kept, ask.tenant, conversation, found, ask.intake)


def _page(page: Page, data: Sequence[bytes]) -> bytes:
    return page.of(orjson.loads(b"[" + b",".join(data) + b"]"))


def _told(conversation: str, head: Head, headers: Mapping[str, str] | None = None) -> Response:
    return _json(Conversation(id=conversation, **head.told), headers)


def _json(answer: Strict, headers: Mapping[str, str] | None = None) -> Response:
    return _bytes(orjson.dumps(answer.model_dump()), headers)


def _bytes(body: bytes, headers: Mapping[str, str] | None = None) -> Response:
    return Response(body, media_type="application/json", headers=headers)

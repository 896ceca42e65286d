"""Endpoints of conversations and their items: /v1/conversations."""

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
from gateway.api.openai.messages import Strict
from gateway.api.plain_requests import read_plain
from gateway.api.responses import items
from gateway.api.responses.conversation_items import (
    ConversationHead,
    add_items,
    build_head_record,
    delete_conversation,
    iter_pages,
    load_head,
    load_item,
)
from gateway.api.responses.lists import PAGE, ItemList, Page, parse_page, render_list
from gateway.api.responses.looks import StoredLookup, open_lookup
from gateway.api.responses.options import Metadata
from gateway.api.responses.stored import Item, dump_items, resolve_references
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
    """An item of a conversation. Inputs and outputs of responses have the same format."""

    id: str
    type: str


def _describe_operation(
    model: type[BaseModel], *, body: type[Strict] | None = None, **more: Any
) -> Schema:
    """Return the OpenAPI description of an operation that answers with `model`."""
    refused = refusals(*(BODY if body else (400,)), 401, 404, 413, 429, 503)
    extra = needs("api_key", optional=True, json=body, **more)
    return {"response_model": model, "responses": refused, "openapi_extra": extra}


@router.post(
    "/v1/conversations",
    summary="Begins a conversation.",
    **_describe_operation(Conversation, body=NewConversation, empty=True),
)
async def create(request: Request) -> Response:
    async with open_lookup(request, counted=True) as lookup:
        wanted, headers = await read_plain(request, lookup.intake, NewConversation)
        conversation = f"conv_{secrets.token_hex(16)}"
        fields = {"created_at": int(time.time()), "metadata": wanted.metadata or {}}
        head = ConversationHead(fields, lookup.conversations.redis_time_ms)
        await lookup.conversations.put(lookup.tenant, [build_head_record(conversation, head)])
        if wanted.items:
            await _add_items(lookup, conversation, wanted.items)
        return _respond(conversation, head, headers)


@router.get(
    "/v1/conversations/{conversation_id}",
    summary="A conversation, without its items.",
    **_describe_operation(Conversation),
)
async def retrieve(request: Request, conversation_id: Name) -> Response:
    async with open_lookup(request) as lookup, lookup.slot:
        return _respond(
            conversation_id, await load_head(lookup.conversations, lookup.tenant, conversation_id)
        )


@router.post(
    "/v1/conversations/{conversation_id}",
    summary="Gives a conversation other metadata.",
    **_describe_operation(Conversation, body=ChangedConversation),
)
async def update(request: Request, conversation_id: Name) -> Response:
    async with open_lookup(request, counted=True) as lookup:
        wanted, headers = await read_plain(request, lookup.intake, ChangedConversation)
        async with lookup.slot:
            head = await load_head(lookup.conversations, lookup.tenant, conversation_id)
            head.fields["metadata"] = wanted.metadata or {}
            await lookup.conversations.put(
                lookup.tenant, [build_head_record(conversation_id, head)]
            )
        return _respond(conversation_id, head, headers)


@router.delete(
    "/v1/conversations/{conversation_id}",
    summary="Deletes a conversation, and the items in it.",
    **_describe_operation(ConversationDeleted),
)
async def delete(request: Request, conversation_id: Name) -> Response:
    async with open_lookup(request) as lookup, lookup.slot:
        await delete_conversation(lookup.conversations, lookup.tenant, conversation_id)
        return _json_response(ConversationDeleted(id=conversation_id))


@router.post(
    "/v1/conversations/{conversation_id}/items",
    summary="Adds items to a conversation.",
    **_describe_operation(ItemList, body=AddedItems),
)
async def add(request: Request, conversation_id: Name) -> Response:
    async with open_lookup(request, counted=True) as lookup:
        wanted, headers = await read_plain(request, lookup.intake, AddedItems)
        async with lookup.slot:
            await load_head(lookup.conversations, lookup.tenant, conversation_id)
        added = await _add_items(lookup, conversation_id, wanted.items)
        return _bytes_response(await lookup.intake.work(partial(render_list, added)), headers)


@router.get(
    "/v1/conversations/{conversation_id}/items",
    summary="The items of a conversation, a page at a time.",
    **_describe_operation(ItemList, query=PAGE),
)
async def list_items(request: Request, conversation_id: Name) -> Response:
    wanted = parse_page(request)
    async with open_lookup(request) as lookup, lookup.slot:
        await load_head(lookup.conversations, lookup.tenant, conversation_id)
        data: list[bytes] = []
        async for page in iter_pages(lookup.conversations, lookup.tenant, conversation_id):
            data += [record.data for record in page]
            await lookup.intake.reserve_history(sum(map(len, data)))
        return _bytes_response(await lookup.intake.work(partial(_build_page, wanted, data)))


@router.get(
    "/v1/conversations/{conversation_id}/items/{item_id}",
    summary="One item of a conversation.",
    **_describe_operation(ConversationItem),
)
async def retrieve_item(request: Request, conversation_id: Name, item_id: Name) -> Response:
    async with open_lookup(request) as lookup, lookup.slot:
        return _bytes_response(
            await load_item(lookup.conversations, lookup.tenant, conversation_id, item_id)
        )


@router.delete(
    "/v1/conversations/{conversation_id}/items/{item_id}",
    summary="Takes an item out of a conversation, and deletes it.",
    **_describe_operation(Conversation),
)
async def delete_item(request: Request, conversation_id: Name, item_id: Name) -> Response:
    async with open_lookup(request) as lookup, lookup.slot:
        head = await load_head(lookup.conversations, lookup.tenant, conversation_id)
        await load_item(lookup.conversations, lookup.tenant, conversation_id, item_id)
        await lookup.conversations.delete(lookup.tenant, [item_id])
        return _respond(conversation_id, head)


async def _add_items(
    lookup: StoredLookup, conversation: str, new: Sequence[items.Item]
) -> list[Item]:
    async with lookup.slot:
        new_items = await lookup.intake.work(partial(dump_items, new, "items"))
        items_to_add = await resolve_references(
            lookup.conversations, lookup.tenant, new_items, lookup.intake, "items"
        )
        return await add_items(
            lookup.conversations, lookup.tenant, conversation, items_to_add, lookup.intake
        )


def _build_page(page: Page, data: Sequence[bytes]) -> bytes:
    return page.render(orjson.loads(b"[" + b",".join(data) + b"]"))


def _respond(
    conversation: str, head: ConversationHead, headers: Mapping[str, str] | None = None
) -> Response:
    return _json_response(Conversation(id=conversation, **head.fields), headers)


def _json_response(answer: Strict, headers: Mapping[str, str] | None = None) -> Response:
    return _bytes_response(orjson.dumps(answer.model_dump()), headers)


def _bytes_response(body: bytes, headers: Mapping[str, str] | None = None) -> Response:
    return Response(body, media_type="application/json", headers=headers)

"""Preparation of a request of the Responses API.

This module loads the stored history that the request continues. It also creates the `StorePlan`,
with which the request's items and the response are stored later.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple
from weakref import WeakSet

import orjson

from gateway.api.body import LARGE_BODY_BYTES
from gateway.api.openai.answers import Body
from gateway.api.openai.parameters import check_hints
from gateway.api.responses.answers import ResponseAnswer
from gateway.api.responses.chats import ResponsesChat, build_chat
from gateway.api.responses.conversation_items import (
    build_item_records,
    load_conversation,
    load_head,
)
from gateway.api.responses.item_messages import check_outputs
from gateway.api.responses.items import Item, ItemReference
from gateway.api.responses.known_turns import CachedTurns
from gateway.api.responses.looks import StoredLookup
from gateway.api.responses.requests import ResponsePrompt, ResponseRequest
from gateway.api.responses.stored import (
    EMPTY_HISTORY,
    FINISHED,
    ConversationHistory,
    assign_ids,
    build_turns_record,
    dump_items,
    dump_items_json,
    encode,
    load_history,
    parse_items,
    resolve_references,
)
from gateway.conversations.record import Record
from gateway.conversations.store import Conversations
from gateway.errors import ConversationsOff, InvalidRequest, Overloaded, UnsupportedParameter
from gateway.service import Service

# Maximum bytes of all `StorePlan.new_items` that a process holds in memory for one tenant. This is
# eight times the default maximum size of a request body.
_MAX_PENDING_BYTES = 64 * 1024 * 1024
_NEED_STORAGE = ("previous_response_id", "conversation", "background")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, weakref_slot=True)
class StorePlan:
    """The data that is needed to store a response and the new items of its request.

    Attributes:
        stores_response: True if the response itself is stored.
        is_background: True if no client waits for the response.
        chain: The ids of the earlier responses that the request continues.
        chain_bytes: The total size in bytes of the earlier responses' records.
        new_items: The request's new items as JSON, which is smaller than the parsed items.
        conversation: The id of the conversation to which the new items and the output are added;
            None for no conversation.
        last_order: `Record.order` of the conversation's last item. New items get higher values.
        turns: The cache that has the token ids of the prompt.
        began_ms: `Conversations.redis_time_ms` at the request's arrival.
    """

    service: Service
    tenant: str
    stores_response: bool
    is_background: bool
    chain: Sequence[str]
    chain_bytes: int
    new_items: bytes
    conversation: str | None
    last_order: int
    turns: CachedTurns
    began_ms: int

    @property
    def stores_anything(self) -> bool:
        return self.stores_response or self.conversation is not None

    async def store(self, response: bytes, version: int = FINISHED, *more: Record) -> None:
        """Store a response, and the records `more` together with it.

        Raise the errors of `Conversations.put`.
        """
        conversation = self.conversation
        if conversation is not None:
            [head] = await self.service.conversations.get(self.tenant, [conversation])
            # If the conversation was deleted in the meantime, do not add items to it.
            conversation = None if head is None else conversation
        make = partial(self._build_records, response, version, conversation)
        size = len(response) + len(self.new_items)
        if size <= LARGE_BODY_BYTES:
            records = make()
        else:
            records = await self.service.prompts.threads.run(self.tenant, size, make)
        await self.service.conversations.put(self.tenant, [*records, *more])

    def _build_records(
        self, response: bytes, version: int, conversation: str | None
    ) -> list[Record]:
        fields = orjson.loads(response)
        own = assign_ids(orjson.loads(self.new_items), fields["id"])
        records = []
        if self.stores_response:
            has_turns = bool(self.turns.new) and version == FINISHED
            data = encode(
                response, orjson.dumps(own), self.chain, self.chain_bytes, turned=has_turns
            )
            records.append(Record(fields["id"], data, version, order=self.began_ms))
            if has_turns:
                records.append(build_turns_record(fields["id"], self.turns.new))
        if conversation is not None and fields["status"] in ("completed", "incomplete"):
            records += build_item_records(conversation, own + fields["output"], self.last_order)
        return records


class PendingItems:
    """Limiter of the memory that request items take until their response is stored.

    There is one instance per process. A request of a few hundred bytes may reference stored items
    of megabytes. These items stay in memory while the request is queued and answered, and a tenant
    may have a thousand queued requests.
    """

    def __init__(self) -> None:
        self._large: defaultdict[str, WeakSet[StorePlan]] = defaultdict(WeakSet)

    def add(self, plan: StorePlan) -> None:
        """Count the bytes of the plan's items until the plan is freed.

        Raise Overloaded if the plans of the tenant already have too many bytes in memory.
        """
        if len(plan.new_items) <= LARGE_BODY_BYTES:
            return
        large = self._large[plan.tenant]
        if sum([len(each.new_items) for each in large]) >= _MAX_PENDING_BYTES:
            raise Overloaded("Too many large requests of this key wait to be stored.")
        large.add(plan)


class ResponseStorer:
    """An `AnswerRecorder` that stores a response before the client sees the end of the answer."""

    def __init__(self, plan: StorePlan, answer: ResponseAnswer) -> None:
        self._plan = plan
        self._answer = answer

    async def record_complete(self, response: bytes) -> None:
        await self._plan.store(response)

    async def record_stream(self, body: Body) -> None:
        response, last = self._answer.final_response_and_event
        await self._plan.store(response)
        body.write(last)


class PreparedTurn(NamedTuple):
    """A parsed request together with the stored items that it continues.

    Attributes:
        chat: The chat with the earlier items and the request's own items.
        before: The items that come before the request's own items.
        plan: The data with which the response is stored.
        hints: Names of tool features without effect, for the header x-ignored-parameters. Empty for
            a request that continues no stored items: `chats.parse` has already reported its names.
    """

    chat: ResponsesChat
    before: Sequence[Item]
    plan: StorePlan
    hints: Sequence[str]


async def prepare_turn(service: Service, lookup: StoredLookup, chat: ResponsesChat) -> PreparedTurn:
    """Load the history that a request continues, and create the plan for storing its response.

    Raises:
        InvalidRequest: The request does not fit its history, or a stored record is missing.
        ConversationsUnavailable: The store cannot be read now.
        Overloaded: Too many lookups of the tenant are waiting.
    """
    original, intake = chat.original, lookup.intake
    hints: list[str] = []
    stores_response = _wants_storage(lookup.conversations, original)
    new_items, last_order = original.items, -1
    history, earlier_items = EMPTY_HISTORY, list[Item]()
    if original.continues:
        async with lookup.slot:
            history, last_order = await _load_earlier(lookup, original)
            if any(isinstance(item, ItemReference) for item in new_items):
                dumped_items = await intake.work(partial(dump_items, new_items))
                nbytes = history.nbytes
                named = await resolve_references(
                    lookup.conversations, lookup.tenant, dumped_items, intake, nbytes=nbytes
                )
                new_items = await intake.work(partial(parse_items, named))
                original = original.model_copy(update={"input": new_items})
        earlier_items = await intake.work(partial(parse_items, history.items))
        chat = await intake.work(partial(build_chat, original, [*earlier_items, *new_items]))
        await intake.work(partial(check_outputs, [*earlier_items, *new_items], len(earlier_items)))
        hints += chat.tool_hints
        strict = service.settings.strict_parameters
        await intake.work(partial(check_hints, chat, hints, strict=strict))
    stores_anything = stores_response or original.conversation is not None
    plan = StorePlan(
        service=service,
        tenant=lookup.tenant,
        stores_response=stores_response,
        is_background=bool(getattr(original, "background", None)),
        chain=history.chain,
        chain_bytes=history.nbytes,
        new_items=await intake.work(partial(dump_items_json, new_items))
        if stores_anything
        else b"[]",
        conversation=original.conversation_id,
        last_order=last_order,
        turns=CachedTurns(service.prompts, history.turns),
        began_ms=lookup.conversations.redis_time_ms,
    )
    return PreparedTurn(chat, earlier_items, plan, hints)


async def _load_earlier(
    lookup: StoredLookup, original: ResponsePrompt
) -> tuple[ConversationHistory, int]:
    """Load the stored items that precede the request's own items.

    Return them with the `Record.order` of the conversation's last item. This number is -1 if the
    request does not name a conversation, or if the conversation has no items.
    """
    if original.previous_response_id is not None:
        previous = original.previous_response_id
        return await load_history(lookup.conversations, lookup.tenant, previous, lookup.intake), -1
    if (conversation := original.conversation_id) is not None:
        await load_head(lookup.conversations, lookup.tenant, conversation, "conversation")
        return await load_conversation(
            lookup.conversations, lookup.tenant, conversation, lookup.intake
        )
    return EMPTY_HISTORY, -1


def _wants_storage(conversations: Conversations, original: ResponsePrompt) -> bool:
    """Return True if the response is to be stored.

    Raise InvalidRequest or a subclass if parameters conflict, or if a parameter needs storage that
    is switched off.
    """
    wanted = original.store if isinstance(original, ResponseRequest) else False
    if not conversations.enabled:
        if wanted:
            raise ConversationsOff
        for name in _NEED_STORAGE:
            if getattr(original, name, None):
                raise UnsupportedParameter(
                    f"{name}: this gateway keeps no responses and conversations.", param=name
                )
        return False
    if original.previous_response_id is not None and original.conversation is not None:
        raise InvalidRequest(
            "previous_response_id and conversation exclude each other.",
            param="previous_response_id",
        )
    if wanted is False and getattr(original, "background", None):
        raise InvalidRequest(
            "background: goes with `store: true`, as the answer is fetched later.",
            param="background",
        )
    return wanted is not False

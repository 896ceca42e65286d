"""What a request goes on from, and what is kept of it: settled before its prompt is written."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple
from weakref import WeakSet

import orjson

from gateway.api.answers import Body
from gateway.api.body import LARGE_BODY_BYTES
from gateway.api.parameters import check_hints
from gateway.api.responses.answers import ResponseAnswer
from gateway.api.responses.chats import Chat, chat_of
from gateway.api.responses.conversation_items import all_items, head_of, item_records
from gateway.api.responses.item_messages import check_outputs
from gateway.api.responses.items import Item, ItemReference
from gateway.api.responses.known_turns import KnownTurns
from gateway.api.responses.looks import Asking
from gateway.api.responses.requests import ResponsePrompt, ResponseRequest
from gateway.api.responses.stored import (
    FINISHED,
    NOTHING,
    Earlier,
    dumped,
    earlier,
    encode,
    read,
    resolved,
    turns_record,
    with_ids,
    written,
)
from gateway.conversations.record import Record
from gateway.conversations.store import Conversations
from gateway.errors import ConversationsOff, InvalidRequest, Overloaded, UnsupportedParameter
from gateway.service import Service

# Bytes of one tenant's `Keeping.own` in a process: eight of the largest bodies.
_MOST_UNKEPT = 64 * 1024 * 1024
_NEED_A_STORE = ("previous_response_id", "conversation", "background")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, weakref_slot=True)
class Keeping:
    """Of one request.

    Attributes:
        stored: whether the response is kept itself.
        background: whether nobody waits for it.
        chain: the ids of the responses that it follows, and `before` the bytes of their records.
        own: its new items as JSON, which is less than what was read of them.
        conversation: whose items these become, with those of the answer, behind the place `last`.
        turns: of its prompt.
        began: `Conversations.time` of its request.
    """

    service: Service
    tenant: str
    stored: bool
    background: bool
    chain: Sequence[str]
    before: int
    own: bytes
    conversation: str | None
    last: int
    turns: KnownTurns
    began: int

    @property
    def keeps(self) -> bool:
        return self.stored or self.conversation is not None

    async def put(self, response: bytes, version: int = FINISHED, *more: Record) -> None:
        """Returns once it is kept, and `more` with it. Raises what `Conversations.put` raises."""
        conversation = self.conversation
        if conversation is not None:
            [head] = await self.service.conversations.get(self.tenant, [conversation])
            # It was deleted meanwhile: nothing may come back to it.
            conversation = None if head is None else conversation
        make = partial(self._records, response, version, conversation)
        size = len(response) + len(self.own)
        if size <= LARGE_BODY_BYTES:
            records = make()
        else:
            records = await self.service.prompts.threads.run(self.tenant, size, make)
        await self.service.conversations.put(self.tenant, [*records, *more])

    def _records(self, response: bytes, version: int, conversation: str | None) -> list[Record]:
        told = orjson.loads(response)
        own = with_ids(orjson.loads(self.own), told["id"])
        records = []
        if self.stored:
            turned = bool(self.turns.new) and version == FINISHED
            data = encode(response, orjson.dumps(own), self.chain, self.before, turned=turned)
            records.append(Record(told["id"], data, version, order=self.began))
            if turned:
                records.append(turns_record(told["id"], self.turns.new))
        if conversation is not None and told["status"] in ("completed", "incomplete"):
            records += item_records(conversation, own + told["output"], self.last)
        return records


class Unkept:
    """New items of requests, which stay here until their answers are kept. One for each process.

    A few hundred bytes that refer to kept items have megabytes of them here for as long as the
    request waits and is answered, and a tenant may have a thousand requests waiting.
    """

    def __init__(self) -> None:
        self._large: defaultdict[str, WeakSet[Keeping]] = defaultdict(WeakSet)

    def add(self, keeping: Keeping) -> None:
        """Counts it for as long as somebody has it. Raises Overloaded where there are too many."""
        if len(keeping.own) <= LARGE_BODY_BYTES:
            return
        large = self._large[keeping.tenant]
        if sum([len(each.own) for each in large]) >= _MOST_UNKEPT:
            raise Overloaded("Too many large requests of this key wait to be kept.")
        large.add(keeping)


class Keeper:
    """Keeps an answer before its client is told that it has ended."""

    def __init__(self, keeping: Keeping, answer: ResponseAnswer) -> None:
        self._keeping = keeping
        self._answer = answer

    async def record_complete(self, response: bytes) -> None:
        await self._keeping.put(response)

    async def record_stream(self, body: Body) -> None:
        response, last = self._answer.held
        await self._keeping.put(response)
        body.write(last)


class Settled(NamedTuple):
    """A request with all that it continues.

    Attributes:
        before: the items that come before the request's own.
        hints: names of what these bring and what has no effect.
    """

    chat: Chat
    before: Sequence[Item]
    keeping: Keeping
    hints: Sequence[str]


async def settled(service: Service, ask: Asking, chat: Chat) -> Settled:
    """The chat with all that it goes on from, and what is to be kept of it.

    Raises InvalidRequest and its kinds, ConversationsUnavailable and Overloaded.
    """
    asked, intake = chat.asked, ask.intake
    hints: list[str] = []
    stored = _is_stored(ask.kept, asked)
    own, place = asked.items, -1
    before, found = NOTHING, list[Item]()
    if asked.continues:
        async with ask.look:
            before, place = await _before(ask, asked)
            if any(isinstance(item, ItemReference) for item in own):
                given = await intake.work(partial(dumped, own))
                nbytes = before.nbytes
                named = await resolved(ask.kept, ask.tenant, given, intake, nbytes=nbytes)
                own = await intake.work(partial(read, named))
                asked = asked.model_copy(update={"input": own})
        found = await intake.work(partial(read, before.items))
        chat = await intake.work(partial(chat_of, asked, [*found, *own]))
        await intake.work(partial(check_outputs, [*found, *own], len(found)))
        hints += chat.tool_hints
        strict = service.settings.strict_parameters
        await intake.work(partial(check_hints, chat, hints, strict=strict))
    keeps = stored or asked.conversation is not None
    keeping = Keeping(
        service=service,
        tenant=ask.tenant,
        stored=stored,
        background=bool(getattr(asked, "background", None)),
        chain=before.chain,
        before=before.nbytes,
        own=await intake.work(partial(written, own)) if keeps else b"[]",
        conversation=asked.conversation_id,
        last=place,
        turns=KnownTurns(service.prompts, before.turns),
        began=ask.kept.time,
    )
    return Settled(chat, found, keeping, hints)


async def _before(ask: Asking, asked: ResponsePrompt) -> tuple[Earlier, int]:
    """And the place of the last item, in a conversation."""
    if asked.previous_response_id is not None:
        previous = asked.previous_response_id
        return await earlier(ask.kept, ask.tenant, previous, ask.intake), -1
    if (conversation := asked.conversation_id) is not None:
        await head_of(ask.kept, ask.tenant, conversation, "conversation")
        return await all_items(ask.kept, ask.tenant, conversation, ask.intake)
    return NOTHING, -1


def _is_stored(kept: Conversations, asked: ResponsePrompt) -> bool:
    """Whether the response is to be kept. Raises what is wrong with the wish."""
    wished = asked.store if isinstance(asked, ResponseRequest) else False
    if not kept.enabled:
        if wished:
            raise ConversationsOff
        for name in _NEED_A_STORE:
            if getattr(asked, name, None):
                raise UnsupportedParameter(
                    f"{name}: this gateway keeps no responses and conversations.", param=name
                )
        return False
    if asked.previous_response_id is not None and asked.conversation is not None:
        raise InvalidRequest(
            "previous_response_id and conversation exclude each other.",
            param="previous_response_id",
        )
    if wished is False and getattr(asked, "background", None):
        raise InvalidRequest(
            "background: goes with `store: true`, as the answer is fetched later.",
            param="background",
        )
    return wished is not False

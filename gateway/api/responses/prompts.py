"""The prompt of a request: as its chat template takes the messages, and as long as may be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from gateway.api.intake import Intake
from gateway.api.responses.chats import Chat, chat_of
from gateway.api.responses.items import (
    AdditionalToolsItem,
    CallOutputItem,
    CustomCallItem,
    FunctionCallItem,
    Item,
    MessageItem,
    SearchCallItem,
    SearchOutputItem,
)
from gateway.api.responses.requests import ResponseRequest
from gateway.api.serving import PromptsAndForm
from gateway.config.tenants import Tenant
from gateway.errors import ContextLengthExceeded, InvalidRequest
from gateway.pipeline.fit import check_text, longest_prompt
from gateway.service import Service
from gateway.tokenization.chat_format import ChatFormat

# Of the context, for an answer that does not say how long it may be.
_ROOM = 8

Write = Callable[[Chat, ChatFormat], PromptsAndForm]
"""`system_messages.render_prompt`, with or without more to it."""


async def count_of(
    service: Service, intake: Intake, tenant: Tenant | None, chat: Chat, write: Write
) -> int:
    """Tokens of a prompt. Raises ContextLengthExceeded for what is too long for sure."""
    form = service.prompts.chat_of(None)
    if chat.model:
        route = service.access.route(service.router, tenant, chat.model)
        form = service.prompts.chat_of(route.chat_template)
    (prompt,), _ = await intake.work(partial(write, chat, form))
    assert not isinstance(prompt, list)  # a template writes text
    longest = max(service.replicas.capabilities, key=longest_prompt)
    check_text(service.prompts, longest, str(prompt), param="input")
    name = tenant.name if tenant else ""
    return len(await service.prompts.encode(prompt, add_special_tokens=False, tenant=name))


async def truncated(
    service: Service,
    intake: Intake,
    tenant: Tenant | None,
    chat: Chat,
    write: Write,
    before: Sequence[Item] = (),
) -> Chat:
    """With `truncation: auto`, without the oldest items that leave an answer no room.

    `before` are the items that come before the request's own. Instructions that lead them all stay,
    as do the tools that items bring, and a call goes with its outputs. Where a user's message can
    be the first that is left, it is.
    """
    asked = chat.asked
    if asked.truncation != "auto":
        return chat
    items = [*before, *asked.items]
    longest = max(service.replicas.capabilities, key=longest_prompt)
    rooms = [longest.max_seq_len // _ROOM]
    if isinstance(asked, ResponseRequest) and (wished := asked.max_output_tokens) is not None:
        # What has no room for all of that, whatever is left out, has it for an answer.
        rooms = [wished, *rooms] if wished > rooms[0] else [wished]

    async def fits(candidate: Chat, room: int) -> bool:
        most = min(longest_prompt(longest), longest.max_seq_len - room)
        try:
            return await count_of(service, intake, tenant, candidate, write) <= most
        except InvalidRequest as error:
            # A template may want the user to begin: what else is left out is looked for then.
            if candidate is chat and not isinstance(error, ContextLengthExceeded):
                raise
            return False

    lead = next((n for n, item in enumerate(items) if not _instructs(item)), len(items))
    cuts = _cuts(items, lead)
    users = [n for n in cuts if _is_users(items[n])]

    async def longest_of(places: Sequence[int], room: int) -> Chat | None:
        async def fitting_from(cut: int) -> Chat | None:
            kept = [*items[:lead], *_tools_alone(items[lead:cut]), *items[cut:]]
            candidate = await intake.work(partial(chat_of, asked, kept))
            # The tools are the same, and their items have other places among those that are kept.
            candidate = candidate.model_copy(update={"tool_places": chat.tool_places})
            return candidate if await fits(candidate, room) else None

        # If even the shortest is too long, no other needs to be tried.
        if not places or (fitting := await fitting_from(places[-1])) is None:
            return None
        low, high = 0, len(places) - 1
        while low < high:
            middle = (low + high) // 2
            if found := await fitting_from(places[middle]):
                fitting, high = found, middle
            else:
                low = middle + 1
        return fitting

    for room in rooms:
        if await fits(chat, room):
            return chat
        # Small candidates yield to no other request between them, and there may be dozens.
        intake.offload()
        if found := await longest_of(users, room) or await longest_of(cuts, room):
            return found
    return chat


def _tools_alone(items: Sequence[Item]) -> list[Item]:
    """Return the tools that items bring, without a place in the conversation."""
    return [
        AdditionalToolsItem.model_construct(type="additional_tools", tools=item.tools)
        for item in items
        if isinstance(item, SearchOutputItem | AdditionalToolsItem)
    ]


def _instructs(item: Item) -> bool:
    return isinstance(item, MessageItem) and item.role in ("system", "developer")


def _is_users(item: Item) -> bool:
    return isinstance(item, MessageItem) and item.role == "user"


def _cuts(items: Sequence[Item], lead: int) -> list[int]:
    """Where a conversation can begin anew: behind what leads it, and no call's output alone."""
    last = _last_outputs(items)
    cuts, busy = [], -1
    for n in range(len(items) - 1):
        busy = max(busy, last.get(n, -1))
        if n >= lead and n >= busy:
            cuts.append(n + 1)
    return cuts


def _last_outputs(items: Sequence[Item]) -> dict[int, int]:
    """Return the place of each call's last output by the call's place.

    The output of a search without a `call_id` is that of the nearest such search before it.
    """
    calls: dict[str, int] = {}
    searches: list[int] = []
    last: dict[int, int] = {}
    for n, item in enumerate(items):
        if isinstance(item, FunctionCallItem | CustomCallItem | SearchCallItem):
            if item.call_id is None:
                searches.append(n)
            else:
                calls[item.call_id] = n
        elif isinstance(item, CallOutputItem | SearchOutputItem):
            if item.call_id is not None:
                call = calls.get(item.call_id)
            else:
                call = searches.pop() if searches else None
            if call is not None:
                last[call] = n
    return last

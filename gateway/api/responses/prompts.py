"""The prompt of a Responses API request, truncated if the request asks for truncation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from gateway.api.intake import Intake
from gateway.api.openai.chat_prompts import PromptsAndForm
from gateway.api.responses.chats import ResponsesChat, build_chat
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
from gateway.config.tenants import Tenant
from gateway.errors import ContextLengthExceeded, InvalidRequest
from gateway.pipeline.fit import check_text, longest_prompt
from gateway.service import Service
from gateway.tokenization.chat_format import ChatFormat

# Without `max_output_tokens`, 1/8 of the context is reserved for the answer.
_ANSWER_DIVISOR = 8

Write = Callable[[ResponsesChat, ChatFormat], PromptsAndForm]
"""Function that writes a prompt: `system_messages.render_prompt` or `CachedTurns.write_prompt`."""


async def count_prompt_tokens(
    service: Service, intake: Intake, tenant: Tenant | None, chat: ResponsesChat, write: Write
) -> int:
    """Return the number of tokens of a prompt.

    Raise ContextLengthExceeded if the length of the text alone shows that no replica's context is
    long enough.
    """
    form = service.prompts.chat_of(None)
    if chat.model:
        route = service.access.route(service.router, tenant, chat.model)
        form = service.prompts.chat_of(route.chat_template)
    (prompt,), _ = await intake.work(partial(write, chat, form))
    assert not isinstance(prompt, list)  # A template writes text
    longest = max(service.replicas.capabilities, key=longest_prompt)
    check_text(service.prompts, longest, str(prompt), param="input")
    name = tenant.name if tenant else ""
    return len(await service.prompts.encode(prompt, add_special_tokens=False, tenant=name))


async def truncate(
    service: Service,
    intake: Intake,
    tenant: Tenant | None,
    chat: ResponsesChat,
    write: Write,
    before: Sequence[Item] = (),
) -> ResponsesChat:
    """Return the chat, without its oldest items if the prompt leaves too few tokens for an answer.

    `before` are the items that come before the request's own items. Leading instructions and the
    tools of dropped items are retained. A call is dropped together with its outputs. If possible,
    the first remaining item is a user message.

    Return the chat unchanged if the request lacks `truncation: auto`. Also return it unchanged if
    the prompt is too long even without all items that may be dropped.
    """
    original = chat.original
    if original.truncation != "auto":
        return chat
    items = [*before, *original.items]
    longest = max(service.replicas.capabilities, key=longest_prompt)
    reserves = [longest.max_seq_len // _ANSWER_DIVISOR]
    if isinstance(original, ResponseRequest) and (wanted := original.max_output_tokens) is not None:
        # First try to leave `max_output_tokens` tokens for the answer. If even the shortest chat is
        # too long for that, try to leave only 1/8 of the context, if this is less than
        # `max_output_tokens`.
        reserves = [wanted, *reserves] if wanted > reserves[0] else [wanted]

    async def fits(candidate: ResponsesChat, reserve: int) -> bool:
        max_tokens = min(longest_prompt(longest), longest.max_seq_len - reserve)
        try:
            return (
                await count_prompt_tokens(service, intake, tenant, candidate, write) <= max_tokens
            )
        except InvalidRequest as error:
            # A chat that the template refuses does not fit. Other chats may fit: for example, the
            # template may require that the first message is a user message.
            if candidate is chat and not isinstance(error, ContextLengthExceeded):
                raise
            return False

    lead = next((n for n, item in enumerate(items) if not _is_instruction(item)), len(items))
    cuts = _find_cuts(items, lead)
    users = [n for n in cuts if _is_user_message(items[n])]

    async def find_longest(candidates: Sequence[int], reserve: int) -> ResponsesChat | None:
        async def try_cut(cut: int) -> ResponsesChat | None:
            remaining = [*items[:lead], *_extract_tools(items[lead:cut]), *items[cut:]]
            candidate = await intake.work(partial(build_chat, original, remaining))
            # `build_chat` has set the paths of the tools in `remaining`, in which some items are
            # left out. Restore the paths in the client's request, because error messages contain
            # them.
            candidate = candidate.model_copy(update={"tool_paths": chat.tool_paths})
            return candidate if await fits(candidate, reserve) else None

        # If even the shortest candidate is too long, all others are too.
        if not candidates or (fitting := await try_cut(candidates[-1])) is None:
            return None
        low, high = 0, len(candidates) - 1
        while low < high:
            middle = (low + high) // 2
            if found := await try_cut(candidates[middle]):
                fitting, high = found, middle
            else:
                low = middle + 1
        return fitting

    for reserve in reserves:
        if await fits(chat, reserve):
            return chat
        # Use a thread even if the chats are small. Dozens of chats may be tried, and on the event
        # loop this would block other requests.
        intake.offload()
        if found := await find_longest(users, reserve) or await find_longest(cuts, reserve):
            return found
    return chat


def _extract_tools(items: Sequence[Item]) -> list[Item]:
    """Return the tools that items contain, as items that add no message to the chat."""
    return [
        AdditionalToolsItem.model_construct(type="additional_tools", tools=item.tools)
        for item in items
        if isinstance(item, SearchOutputItem | AdditionalToolsItem)
    ]


def _is_instruction(item: Item) -> bool:
    return isinstance(item, MessageItem) and item.role in ("system", "developer")


def _is_user_message(item: Item) -> bool:
    return isinstance(item, MessageItem) and item.role == "user"


def _find_cuts(items: Sequence[Item], lead: int) -> list[int]:
    """Return the indices at which a conversation can be cut: after its leading instructions, and
    never between a call and its outputs."""
    last = _map_last_outputs(items)
    cuts, busy = [], -1
    for n in range(len(items) - 1):
        busy = max(busy, last.get(n, -1))
        if n >= lead and n >= busy:
            cuts.append(n + 1)
    return cuts


def _map_last_outputs(items: Sequence[Item]) -> dict[int, int]:
    """Map the index of each call to the index of its last output.

    An output of a tool search may lack a `call_id`. It then belongs to the last search before it
    that lacks a `call_id`, too.
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

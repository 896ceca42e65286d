"""A request for a generation, in whatever protocol: prepared, then answered, streamed or whole.

A protocol brings how its body is read, as one of OpenAI's requests, and how its answer is written.
"""

from __future__ import annotations

import math
import re
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, TypeVar

from fastapi import Request
from starlette.responses import Response

from gateway.api import ignored
from gateway.api.answers import Body, Collector
from gateway.api.auth import tenant_of
from gateway.api.chunks import UsageFrames
from gateway.api.failures import status_of
from gateway.api.generation_request import GenerationRequest
from gateway.api.intake import Intake
from gateway.api.parameters import Parsed
from gateway.api.rate_headers import rate_headers
from gateway.api.request_log import context_of, header_of, service_of
from gateway.api.schemas import ChatCompletionRequest, CompletionRequest
from gateway.api.sse import EventBody, EventStream, WireFormat, cancel_on_disconnect
from gateway.api.validation import show_value
from gateway.config.tenants import Tenant
from gateway.deltas import Sink, TextDelta
from gateway.errors import InvalidRequest, UnsupportedParameter
from gateway.generation import Batch, Caller, Options
from gateway.observability.request_context import RequestContext
from gateway.parsers import harmony
from gateway.parsers.message import MessageForm
from gateway.parsers.reasoning import is_open
from gateway.parsers.tools.ids import TemplateIds
from gateway.pipeline.fit import Prompt
from gateway.pipeline.generate import generate
from gateway.pipeline.prepare import prepare
from gateway.service import Service
from gateway.tenancy.accounting import Account
from gateway.tenancy.limits.reservation import Reservation
from gateway.tokenization.chat_format import ChatFormat

# To write them takes 5 ms at most, as the event loop's other work does.
_FEW_LOG_PROBABILITIES = 100
# Of what `float` reads: it takes 1_0 for 10, and spaces of any alphabet. No digit can be of two of
# its parts: a header of 64 KiB is looked through once, not once for each of its digits.
_NUMBER = re.compile(r"\+?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")

_Turn = AbstractAsyncContextManager[object]

R = TypeVar("R", bound=GenerationRequest)

Prompts = tuple[Sequence[Prompt], MessageForm | None]
"""The prompts of a request, and how to read the answer; None when it is plain text."""


class Answer(Protocol):
    """How one request's answer is written."""

    def stream(self, body: Body, usage: UsageFrames) -> Sink:
        """Writes frames of all choices as they come, and what ends an answer that came whole."""

    def collected(self, received: list[list[TextDelta]], *, keep: int | None) -> bytes:
        """The whole answer, of the deltas of each choice, with the `keep` likeliest ones."""

    def log_probabilities(self, received: list[list[TextDelta]]) -> int:
        """Of how many tokens `collected` has some to write; each with 20 alternatives is 50 us."""


Settle = Callable[[Intake, Tenant | None, R], Awaitable[R]]
MakeAnswer = Callable[[Service, R, Options, Batch], Answer]
Rename = Callable[[InvalidRequest], InvalidRequest]
"""Names a chat's parameter as the protocol calls it."""


@dataclass(slots=True)
class Prepared:
    """What is left of a request that may run: of a body of megabytes, the token ids."""

    batch: Batch
    account: Account
    adapter_version: str | None
    answer: Answer
    keep: int | None
    stream: bool
    usage: UsageFrames
    hints: tuple[str, ...] = ()


async def prepared(
    request: Request,
    parse: Callable[[bytes], Parsed[R]],
    prompts: Callable[[R, ChatFormat], Prompts],
    answer: MakeAnswer[R],
    settle: Settle[R] | None = None,
    as_written: Rename | None = None,
) -> Prepared:
    """Reads a request and makes it ready. Raises what the table of `failures` has rows for.

    `settle` is for what a body alone does not say. `as_written` is for what is refused once the
    body was read: until then, a parameter is what the client called it.
    """
    service = service_of(request.scope)
    tenant = tenant_of(request)
    async with Intake(request, tenant) as intake:
        # One too many is refused before anything is read or worked out for it.
        with await service.accounting.count(tenant, slots=1) as reservation:
            await service.replicas.wait_until_back()
            wanted, hints, unknown = await intake.read(parse)
            if unknown:
                service.metrics.count_unknown_parameters(unknown, tenant.name if tenant else "")
            try:
                if settle is not None:
                    wanted = await settle(intake, tenant, wanted)
                ready = await _prepare(
                    request, tenant, intake, reservation, wanted, prompts, answer
                )
            except InvalidRequest as error:
                if as_written is None:
                    raise
                raise as_written(error) from None
            ready.hints = hints
            return ready


def plain(wanted: CompletionRequest, _: ChatFormat) -> Prompts:
    return wanted.prompts, None


def rendered(wanted: ChatCompletionRequest, chat: ChatFormat) -> Prompts:
    ids = TemplateIds(chat.tool_form)
    messages = [message.for_template(ids) for message in wanted.messages]
    extra = dict(wanted.chat_template_kwargs or {})
    if wanted.reasoning_effort is not None:
        extra["reasoning_effort"] = wanted.reasoning_effort
        if wanted.reasoning_effort == "none":
            extra.setdefault("enable_thinking", False)
    # A guide holds from the first token on: there is no room for thoughts before the answer.
    guided = wanted.guide()[0] is not None
    tools = wanted.offered_tools
    # With `tool_choice: none` the tools stay: the prompt then shares the cached prefix of `auto`.
    if tools and not wanted.allows_calls and chat.excludes_uncallable_tools:
        tools = None
    prompt = chat.render(
        messages,
        tools,
        extra,
        open_turn=wanted.add_generation_prompt is not False,
        go_on=bool(wanted.continue_final_message),
        guided=guided,
    )
    return [prompt], _message_form(chat, wanted, str(prompt), guided=guided)


def _message_form(
    chat: ChatFormat, wanted: ChatCompletionRequest, prompt: str, *, guided: bool
) -> MessageForm | None:
    """How to read the answer; None when it is plain text."""
    tools = None
    guided_calls = wanted.forced or wanted.either
    if wanted.allows_calls:
        tools = chat.tool_form
        if tools is None and wanted.forced is None:
            raise UnsupportedParameter(
                "This model's chat template teaches no known form of tool calls; "
                "GATEWAY_TOOL_FORM can name one.",
                param="tools",
            )
        if guided and guided_calls is None:
            tools = None  # what matches a format is an answer, even one that looks like a call
    reasoning = None if guided else chat.reasoning_tags
    channel = None
    if chat.tool_form == "openai" and not guided:
        channel = harmony.begun(prompt)
    if tools is None and reasoning is None and channel is None and guided_calls is None:
        return None
    # These stay for as long as it is generated. Tools that are not offered are in no prompt, whose
    # limit would bound them, and guided calls are JSON, which has the types of their arguments.
    typed = wanted.callable_tools if tools is not None and guided_calls is None else None
    return MessageForm(
        tools=tools,
        functions={tool.function.name: tool.function.parameters for tool in typed or ()},
        custom=wanted.plain_text_tools if tools is not None else (),
        guided=guided_calls,
        parallel=wanted.parallel_tool_calls is not False,
        reasoning=reasoning,
        reasoning_open=reasoning is not None and is_open(prompt, reasoning),
        channel=channel,
    )


async def _prepare(
    request: Request,
    tenant: Tenant | None,
    intake: Intake,
    reservation: Reservation,
    wanted: R,
    prompts: Callable[[R, ChatFormat], Prompts],
    make_answer: MakeAnswer[R],
) -> Prepared:
    """`reservation` has the request counted, and its first place."""
    service = service_of(request.scope)
    route = service.access.route(service.router, tenant, wanted.model)
    places, limit = _places(tenant, wanted), _output_limit(tenant, wanted)
    timeout_s = timeout_of(request, service.settings.request_timeout)
    await reservation.take_slots(places - 1)
    chat = service.prompts.chat_of(route.chat_template)
    first_token_within = tenant.first_token_within if tenant else None
    caller = Caller(
        tenant=tenant.name if tenant else "",
        priority=tenant.priority if tenant else 0,
        timeout_s=timeout_s,
        first_token_within=first_token_within,
        max_expected_wait_s=service.settings.max_expected_wait if not first_token_within else None,
        billed=tenant is not None or service.settings.usage_log is not None,
        apart=tenant is not None and not service.settings.tenants_trust_each_other,
        guides=tenant.guides if tenant else "checked",
    )
    lora = route.lora
    if lora is not None:
        turn = partial(_cold_send, service, caller, lora.nbytes)
        lora = replace(lora, turn=turn, tenant=caller.tenant)

    def made() -> tuple[Sequence[Prompt], Options]:
        given, message = prompts(wanted, chat)
        # Guides are made of all the tools, or of a text that is JSON.
        return given, wanted.options(lora, message, caller)

    given, options = await intake.work(made)
    if limit != options.max_tokens:
        options = replace(options, max_tokens=limit)
    if chat.stop_ids and not options.goes_past_ends:
        ends = (*options.stop_token_ids, *chat.stop_ids)
        options = replace(options, stop_token_ids=ends)
    context = context_of(request.scope)
    context.model, context.adapter_version = service.settings.model_name, route.version
    batch = await prepare(service, given, options, chat=isinstance(wanted, ChatCompletionRequest))
    context.batch = batch
    answer = make_answer(service, wanted, options, batch)
    # The last thing that may fail or wait: from here on the account is sure to be closed.
    stated = wanted.output_limit is not None
    account = await service.accounting.open(
        context,
        batch,
        reservation,
        tenant=tenant,
        route=route,
        stated=stated,
        status_of=status_of,
    )
    return Prepared(
        batch=batch,
        account=account,
        adapter_version=route.version,
        answer=answer,
        keep=wanted.keep,
        stream=bool(wanted.stream),
        usage=wanted.usage_frames,
    )


def _cold_send(service: Service, caller: Caller, nbytes: int) -> _Turn:
    """The turn to have so many bytes of weights here; more than a tenant may have go alone."""
    sends = service.cold_sends
    cost = min(nbytes, sends.max_cost() or nbytes)
    return sends.permit(caller.tenant, caller.priority, cost=cost)


class Keeper(Protocol):
    """Whoever has something to do with an answer before its client is told that it has ended."""

    async def whole(self, answer: bytes) -> None:
        """Raises what the answer then fails with."""

    async def streamed(self, body: Body) -> None:
        """Writes what the answer's sink has held back. Raises as `whole`."""


def headers_of(prepared: Prepared) -> dict[str, str]:
    """What the client is told beside the answer."""
    headers = rate_headers(prepared.account.quotas)
    if prepared.adapter_version:
        headers["x-adapter-version"] = prepared.adapter_version
    unenforced = prepared.batch.unenforced
    if prepared.hints or unenforced.names:
        names = (*prepared.hints, *unenforced.names)
        headers |= ignored.headers_of(names, unenforced.more)
    return headers


async def respond(
    request: Request, prepared: Prepared, wire: WireFormat, keeper: Keeper | None = None
) -> Response:
    service = service_of(request.scope)
    context = context_of(request.scope)
    batch, account, answer = prepared.batch, prepared.account, prepared.answer
    headers = headers_of(prepared)
    if prepared.stream:
        # A closure would be 350 bytes more of each open stream.
        write = partial(_write, service, context, batch, answer, prepared.usage, keeper)
        return EventStream(write, headers, service.settings.keep_alive, account, wire)
    collector = Collector(batch.choices)
    async with account, cancel_on_disconnect(request.scope):
        await generate(service, context, batch, collector)
        collect = partial(answer.collected, collector.received, keep=prepared.keep)
        if answer.log_probabilities(collector.received) <= _FEW_LOG_PROBABILITIES:
            body = collect()
        else:
            body = await service.logits.run(batch.caller.tenant, 0, collect)
        if keeper is not None:
            await keeper.whole(body)
    return Response(body, media_type="application/json", headers=headers)


async def _write(
    service: Service,
    context: RequestContext,
    batch: Batch,
    answer: Answer,
    usage: UsageFrames,
    keeper: Keeper | None,
    body: EventBody,
) -> None:
    if service.settings.keep_alive_in_queue:
        body.expect()
    sink = answer.stream(body, usage)
    # Not before it is its turn: behind a comment no refusal by the queue is a 503.
    await generate(service, context, batch, sink, on_place=body.expect)
    if keeper is not None:
        await keeper.streamed(body)


def _places(tenant: Tenant | None, wanted: GenerationRequest) -> int:
    """What a request takes of `concurrent_requests`: one for each sequence that is generated.

    Raises InvalidRequest for more than the tenant may have at once.
    """
    sequences, prompts = wanted.sequences, wanted.several
    places = prompts * sequences
    allowed = tenant.concurrent_requests if tenant else None
    if allowed is not None and places > allowed:
        what = (
            f"{prompts} prompts of {sequences} choices" if prompts > 1 else f"{sequences} choices"
        )
        raise InvalidRequest(
            f"{what} asked for; this key may have {allowed} at once.",
            param="prompt" if prompts > 1 else "n",
        )
    return places


def timeout_of(request: Request, most_s: float) -> float | None:
    """Seconds, from the header x-request-timeout, where they are fewer than all have.

    Raises InvalidRequest.
    """
    given = header_of(request.scope, b"x-request-timeout")
    if given is None:
        return None
    seconds = float(given) if _NUMBER.fullmatch(given) else 0.0
    if not 0 < seconds < math.inf:
        raise InvalidRequest(
            f"x-request-timeout: found {given[:40]!r}; allowed: a number of seconds above 0.",
            param="x-request-timeout",
        )
    return seconds if seconds < most_s else None


def _output_limit(tenant: Tenant | None, wanted: GenerationRequest) -> int | None:
    """Tokens of one choice, by the request and what its tenant may have. Raises InvalidRequest."""
    asked = wanted.output_limit
    allowed = tenant.max_output_tokens if tenant else None
    if asked is None or allowed is None:
        return allowed if asked is None else asked
    if asked > allowed:
        given = wanted.model_fields_set
        param = "max_completion_tokens" if "max_completion_tokens" in given else "max_tokens"
        raise InvalidRequest(
            f"{param}: found {show_value(asked)}; this key allows {allowed}.", param=param
        )
    return asked

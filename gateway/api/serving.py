"""Processing of a generation request in any protocol: prepare it, then stream or send the answer.

A protocol provides functions that parse its body into one of OpenAI's requests and a writer for its
answer.
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
from gateway.api.auth import authenticate_tenant
from gateway.api.failures import status_of
from gateway.api.intake import Intake
from gateway.api.openai.answers import Body, DeltaCollector
from gateway.api.openai.chunks import UsageFrames
from gateway.api.openai.generation_request import GenerationRequest
from gateway.api.openai.parameters import Parsed
from gateway.api.openai.schemas import ChatCompletionRequest, CompletionRequest
from gateway.api.rate_headers import build_rate_headers
from gateway.api.request_log import context_of, header_of, service_of
from gateway.api.sse import EventBody, EventStream, WireFormat, cancel_on_disconnect
from gateway.api.validation import show_value
from gateway.config.tenants import Tenant
from gateway.deltas import Sink, TextDelta
from gateway.errors import InvalidRequest, UnsupportedParameter
from gateway.generation.batch import Batch
from gateway.generation.options import Caller, Options
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

# Writing so many takes at most 5 ms, like other work on the event loop.
_MAX_INLINE_LOGPROBS = 100
# Stricter than `float`, which accepts `1_0` and spaces of any alphabet. No digit can match two
# parts of the pattern, so a header of 64 KiB is scanned in linear time.
_NUMBER = re.compile(r"\+?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")

_Permit = AbstractAsyncContextManager[object]

R = TypeVar("R", bound=GenerationRequest)

PromptsAndForm = tuple[Sequence[Prompt], MessageForm | None]
"""The prompts of a request, and the form for parsing the answer; None for plain text."""


class AnswerWriter(Protocol):
    """A writer of one request's answer."""

    def stream(self, body: Body, usage: UsageFrames) -> Sink:
        """Return a sink that writes the frames of all choices, and the end of a complete answer."""

    def build_complete(self, received: list[list[TextDelta]], *, num_returned: int | None) -> bytes:
        """Build the complete answer from the deltas of each choice.

        Only the `num_returned` likeliest choices of each prompt are included; None for all.
        """

    def count_logprobs(self, received: list[list[TextDelta]]) -> int:
        """Return the number of tokens whose log probabilities `build_complete` would write.

        Each takes 50 us with 20 alternatives.
        """


ResolveRequest = Callable[[Intake, Tenant | None, R], Awaitable[R]]
MakeAnswer = Callable[[Service, R, Options, Batch], AnswerWriter]
Rename = Callable[[InvalidRequest], InvalidRequest]
"""Names a chat's parameter in an error as the protocol calls it."""


@dataclass(slots=True)
class PreparedRequest:
    """A request that is ready to run, without its body, which may have been megabytes."""

    batch: Batch
    account: Account
    adapter_version: str | None
    answer: AnswerWriter
    num_returned: int | None
    stream: bool
    usage: UsageFrames
    hints: tuple[str, ...] = ()


async def prepare_request(
    request: Request,
    parse: Callable[[bytes], Parsed[R]],
    prompts: Callable[[R, ChatFormat], PromptsAndForm],
    answer: MakeAnswer[R],
    resolve: ResolveRequest[R] | None = None,
    rename: Rename | None = None,
) -> PreparedRequest:
    """Read, parse and prepare a request. Raise errors that are listed in `failures.TABLE`.

    Args:
        request: the HTTP request.
        parse: parses the body.
        prompts: renders the prompts.
        answer: creates the writer of the answer.
        resolve: adds data that is not in the body, such as stored conversations.
        rename: renames parameters in errors raised after parsing. Before, errors use the client's
            names already.
    """
    service = service_of(request.scope)
    tenant = authenticate_tenant(request)
    async with Intake(request, tenant) as intake:
        # Refuse a request above the tenant's limits before its body is read.
        with await service.accounting.count(tenant, slots=1) as reservation:
            await service.replicas.wait_until_back()
            wanted, hints, unknown = await intake.read(parse)
            if unknown:
                service.metrics.count_unknown_parameters(unknown, tenant.name if tenant else "")
            try:
                if resolve is not None:
                    wanted = await resolve(intake, tenant, wanted)
                ready = await _prepare(
                    request, tenant, intake, reservation, wanted, prompts, answer
                )
            except InvalidRequest as error:
                if rename is None:
                    raise
                raise rename(error) from None
            ready.hints = hints
            return ready


def get_prompts(wanted: CompletionRequest, _: ChatFormat) -> PromptsAndForm:
    """Return a completion's prompts, whose answers are plain text."""
    return wanted.prompts, None


def render_chat(wanted: ChatCompletionRequest, chat: ChatFormat) -> PromptsAndForm:
    """Render a chat by its template, with the form for parsing the answer.

    Raise InvalidRequest if the template refuses the messages, or tools cannot be parsed.
    """
    ids = TemplateIds(chat.tool_form)
    messages = [message.to_template(ids) for message in wanted.messages]
    extra = dict(wanted.chat_template_kwargs or {})
    if wanted.reasoning_effort is not None:
        extra["reasoning_effort"] = wanted.reasoning_effort
        if wanted.reasoning_effort == "none":
            extra.setdefault("enable_thinking", False)
    # A guide applies from the first token on, so the answer cannot begin with reasoning.
    guided = wanted.build_guide()[0] is not None
    tools = wanted.offered_tools
    # Keep the tools with `tool_choice: none`: the prompt then shares the cached prefix of `auto`.
    if tools and not wanted.allows_calls and chat.excludes_uncallable_tools:
        tools = None
    prompt = chat.render(
        messages,
        tools,
        extra,
        open_turn=wanted.add_generation_prompt is not False,
        continue_last=bool(wanted.continue_final_message),
        guided=guided,
    )
    return [prompt], _make_message_form(chat, wanted, str(prompt), guided=guided)


def _make_message_form(
    chat: ChatFormat, wanted: ChatCompletionRequest, prompt: str, *, guided: bool
) -> MessageForm | None:
    """Return the form for parsing the answer; None for plain text."""
    tools = None
    guided_calls = wanted.forced_call or wanted.either
    if wanted.allows_calls:
        tools = chat.tool_form
        if tools is None and wanted.forced_call is None:
            raise UnsupportedParameter(
                "This model's chat template teaches no known form of tool calls; "
                "GATEWAY_TOOL_FORM can name one.",
                param="tools",
            )
        if guided and guided_calls is None:
            tools = None  # text in a required format is an answer, even if it resembles a call
    reasoning = None if guided else chat.reasoning_tags
    channel = None
    if chat.tool_form == "openai" and not guided:
        channel = harmony.read_open_header(prompt)
    if tools is None and reasoning is None and channel is None and guided_calls is None:
        return None
    # The form is held in memory during the generation, so store only the schemas that are needed.
    # Tools that are not offered are not bounded by the prompt limit. Guided calls are JSON and need
    # no schemas for the types of their arguments.
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
    prompts: Callable[[R, ChatFormat], PromptsAndForm],
    make_answer: MakeAnswer[R],
) -> PreparedRequest:
    """Prepare a parsed request; `reservation` already counts it with one sequence."""
    service = service_of(request.scope)
    route = service.access.route(service.router, tenant, wanted.model)
    num_sequences, limit = _count_sequences(tenant, wanted), _resolve_output_limit(tenant, wanted)
    timeout_s = parse_timeout(request, service.settings.request_timeout)
    await reservation.take_slots(num_sequences - 1)
    chat = service.prompts.chat_of(route.chat_template)
    first_token_within = tenant.first_token_within if tenant else None
    caller = Caller(
        tenant=tenant.name if tenant else "",
        priority=tenant.priority if tenant else 0,
        timeout_s=timeout_s,
        first_token_within=first_token_within,
        max_expected_wait_s=service.settings.max_expected_wait if not first_token_within else None,
        billed=tenant is not None or service.settings.usage_log is not None,
        isolated_cache=tenant is not None and not service.settings.tenants_trust_each_other,
        guides=tenant.guides if tenant else "checked",
    )
    lora = route.lora
    if lora is not None:
        permit = partial(_permit_upload, service, caller, lora.nbytes)
        lora = replace(lora, upload_slot=permit, tenant=caller.tenant)

    def build_prompts() -> tuple[Sequence[Prompt], Options]:
        given, message = prompts(wanted, chat)
        # Building guides may take long: it serializes all tools or parses JSON text.
        return given, wanted.build_options(lora, message, caller)

    given, options = await intake.work(build_prompts)
    if limit != options.max_tokens:
        options = replace(options, max_tokens=limit)
    if chat.stop_ids and not options.ignores_ends:
        ends = (*options.stop_token_ids, *chat.stop_ids)
        options = replace(options, stop_token_ids=ends)
    context = context_of(request.scope)
    context.model, context.adapter_version = service.settings.model_name, route.version
    batch = await prepare(service, given, options, chat=isinstance(wanted, ChatCompletionRequest))
    context.batch = batch
    answer = make_answer(service, wanted, options, batch)
    # Last step that may fail or wait: the caller closes the account after this.
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
    return PreparedRequest(
        batch=batch,
        account=account,
        adapter_version=route.version,
        answer=answer,
        num_returned=wanted.num_returned,
        stream=bool(wanted.stream),
        usage=wanted.usage_frames,
    )


def _permit_upload(service: Service, caller: Caller, nbytes: int) -> _Permit:
    """Return a permit to load and upload `nbytes` of weights.

    An adapter above the tenant's share of the budget needs all of that share.
    """
    budget = service.upload_budget
    cost = min(nbytes, budget.max_cost() or nbytes)
    return budget.permit(caller.tenant, caller.priority, cost=cost)


class AnswerRecorder(Protocol):
    """A hook that stores an answer before the client learns that it is complete."""

    async def record_complete(self, answer: bytes) -> None:
        """Store the complete JSON answer. An exception becomes the error of the request."""

    async def record_stream(self, body: Body) -> None:
        """Store a streamed answer, then write the last events, which its sink has held back.

        Raise like `record_complete`.
        """


def build_headers(prepared: PreparedRequest) -> dict[str, str]:
    """Build the response headers: rate limits, adapter version and ignored parameters."""
    headers = build_rate_headers(prepared.account.quotas)
    if prepared.adapter_version:
        headers["x-adapter-version"] = prepared.adapter_version
    unenforced = prepared.batch.unenforced
    if prepared.hints or unenforced.names:
        names = (*prepared.hints, *unenforced.names)
        headers |= ignored.build_headers(names, unenforced.more)
    return headers


async def respond(
    request: Request,
    prepared: PreparedRequest,
    wire: WireFormat,
    recorder: AnswerRecorder | None = None,
) -> Response:
    """Run a prepared request and return its response: a stream, or JSON when it is complete."""
    service = service_of(request.scope)
    context = context_of(request.scope)
    batch, account, answer = prepared.batch, prepared.account, prepared.answer
    headers = build_headers(prepared)
    if prepared.stream:
        # A closure would take 350 bytes more for each open stream.
        write = partial(_write, service, context, batch, answer, prepared.usage, recorder)
        return EventStream(write, headers, service.settings.keep_alive, account, wire)
    collector = DeltaCollector(batch.choices)
    async with account, cancel_on_disconnect(request.scope):
        await generate(service, context, batch, collector)
        collect = partial(
            answer.build_complete, collector.received, num_returned=prepared.num_returned
        )
        if answer.count_logprobs(collector.received) <= _MAX_INLINE_LOGPROBS:
            body = collect()
        else:
            body = await service.logits.run(batch.caller.tenant, 0, collect)
        if recorder is not None:
            await recorder.record_complete(body)
    return Response(body, media_type="application/json", headers=headers)


async def _write(
    service: Service,
    context: RequestContext,
    batch: Batch,
    answer: AnswerWriter,
    usage: UsageFrames,
    recorder: AnswerRecorder | None,
    body: EventBody,
) -> None:
    if service.settings.keep_alive_in_queue:
        body.start_keep_alive()
    sink = answer.stream(body, usage)
    # Start keep-alive comments only after admission: after a comment, no 503 can be sent.
    await generate(service, context, batch, sink, on_slot=body.start_keep_alive)
    if recorder is not None:
        await recorder.record_stream(body)


def _count_sequences(tenant: Tenant | None, wanted: GenerationRequest) -> int:
    """Return the number of generated sequences, each of which counts for `concurrent_requests`.

    Raise InvalidRequest if it exceeds the tenant's limit.
    """
    sequences, prompts = wanted.num_sequences, wanted.num_prompts
    total = prompts * sequences
    allowed = tenant.concurrent_requests if tenant else None
    if allowed is not None and total > allowed:
        what = (
            f"{prompts} prompts of {sequences} choices" if prompts > 1 else f"{sequences} choices"
        )
        raise InvalidRequest(
            f"{what} asked for; this key may have {allowed} at once.",
            param="prompt" if prompts > 1 else "n",
        )
    return total


def parse_timeout(request: Request, max_s: float) -> float | None:
    """Return the seconds in the header x-request-timeout if they are below `max_s`; else None.

    Raise InvalidRequest for a malformed header.
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
    return seconds if seconds < max_s else None


def _resolve_output_limit(tenant: Tenant | None, wanted: GenerationRequest) -> int | None:
    """Return the output token limit of a choice, from the request and the tenant's limit.

    Raise InvalidRequest if the request asks for more than the tenant may have.
    """
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

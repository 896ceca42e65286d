"""Preparation of a generation request in any protocol, and the response to it.

Each protocol first converts its request to an OpenAI chat or completion request. It also provides a
function that renders the prompts, and an `AnswerWriter` that encodes the answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, TypeVar

from fastapi import Request
from starlette.responses import Response

from gateway.api import ignored
from gateway.api.failures import status_of
from gateway.api.openai.answers import Body, DeltaCollector
from gateway.api.openai.chat_prompts import PromptsAndForm
from gateway.api.openai.chunks import UsageFrames
from gateway.api.openai.generation_request import GenerationRequest
from gateway.api.openai.schemas import ChatCompletionRequest
from gateway.api.rate_headers import build_rate_headers
from gateway.api.receiving import ReceivedRequest
from gateway.api.request_bounds import count_sequences, parse_timeout, resolve_output_limit
from gateway.api.request_log import context_of, service_of
from gateway.api.sse import EventBody, EventStream, WireFormat, cancel_on_disconnect
from gateway.deltas import Sink, TextDelta
from gateway.generation.batch import Batch
from gateway.generation.options import Caller, Options
from gateway.observability.request_context import RequestContext
from gateway.pipeline.fit import Prompt
from gateway.pipeline.generate import generate
from gateway.pipeline.prepare import prepare
from gateway.service import Service
from gateway.tenancy.accounting import Account
from gateway.tokenization.chat_format import ChatFormat

# Maximum number of log probabilities in an answer that is encoded on the event loop. Encoding them
# takes at most 5 ms. Answers with more log probabilities are encoded in a thread.
_MAX_INLINE_LOGPROBS = 100

_Permit = AbstractAsyncContextManager[object]

R = TypeVar("R", bound=GenerationRequest)


class AnswerWriter(Protocol):
    """Encoder of one request's answer in the client's protocol."""

    def stream(self, body: Body, usage: UsageFrames) -> Sink:
        """Return a sink that writes all choices as SSE events, then the end of the answer."""

    def build_complete(self, received: list[list[TextDelta]], *, num_returned: int | None) -> bytes:
        """Encode the complete answer from the deltas of each choice.

        `num_returned` is the number of choices to include for each prompt: the likeliest ones. None
        to include all choices.
        """

    def count_logprobs(self, received: list[list[TextDelta]]) -> int:
        """Return the number of tokens whose log probabilities `build_complete` would encode.

        Encoding the log probabilities of a token and 20 alternatives takes 50 us.
        """


MakeAnswer = Callable[[Service, R, Options, Batch], AnswerWriter]


@dataclass(slots=True)
class PreparedRequest:
    """A generation request that is ready to run.

    This object does not refer to the request's body, which may be megabytes. So the body can be
    freed.
    """

    batch: Batch
    account: Account
    adapter_version: str | None
    answer: AnswerWriter
    num_returned: int | None
    stream: bool
    usage: UsageFrames
    hints: tuple[str, ...] = ()


async def prepare_request(
    received: ReceivedRequest[Any],
    wanted: R,
    prompts: Callable[[R, ChatFormat], PromptsAndForm],
    make_answer: MakeAnswer[R],
) -> PreparedRequest:
    """Prepare a received request. Raise the errors that are listed in `failures.TABLE`.

    Args:
        received: the request.
        wanted: the same request as an OpenAI chat or completion request.
        prompts: renders the prompts.
        make_answer: creates the writer of the answer.
    """
    request, tenant, reservation = received.request, received.tenant, received.reservation
    service = service_of(request.scope)
    route = service.access.route(service.router, tenant, wanted.model)
    num_sequences, limit = count_sequences(tenant, wanted), resolve_output_limit(tenant, wanted)
    timeout_s = parse_timeout(request, service.settings.request_timeout)
    await reservation.take_slots(num_sequences - 1)
    chat = service.prompts.chat_of(route.chat_template)
    first_token_within = tenant.first_token_within if tenant else None
    caller = Caller(
        tenant=received.tenant_name,
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
        # Build the options inside `work`, which may use a thread: building guides may take long,
        # because it serializes all tools or parses JSON text.
        return given, wanted.build_options(lora, message, caller)

    given, options = await received.intake.work(build_prompts)
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
    # The caller closes the account. If a step after this call failed, the caller would get no
    # account and could not close it. So open the account as the last step that may fail.
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
        hints=received.hints,
    )


def _permit_upload(service: Service, caller: Caller, nbytes: int) -> _Permit:
    """Return a permit to load and upload `nbytes` of adapter weights.

    Entering the permit waits until the upload budget has `nbytes` free bytes for the tenant. A
    tenant can only get a part of the budget. For an adapter that is larger than this part, the
    permit takes all of the part. Otherwise such an adapter would wait forever.
    """
    budget = service.upload_budget
    cost = min(nbytes, budget.max_cost() or nbytes)
    return budget.permit(caller.tenant, caller.priority, cost=cost)


class AnswerRecorder(Protocol):
    """Callbacks that store an answer before the client receives the end of the answer."""

    async def record_complete(self, answer: bytes) -> None:
        """Store the complete JSON answer.

        If this method raises an error, the request fails with that error.
        """

    async def record_stream(self, body: Body) -> None:
        """Store a streamed answer, then write the last SSE events to `body`.

        The answer's `Sink` leaves these events out, so that the client gets them only after the
        answer is stored. If this method raises an error, the request fails with that error.
        """


def build_headers(prepared: PreparedRequest) -> dict[str, str]:
    """Return the response headers: rate limits, adapter version and ignored parameters."""
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
    """Return the response to a prepared request: an SSE stream, or JSON.

    A stream is returned at once, and tokens are generated while it is sent. A JSON response is
    returned after all tokens are generated.
    """
    service = service_of(request.scope)
    context = context_of(request.scope)
    batch, account, answer = prepared.batch, prepared.account, prepared.answer
    headers = build_headers(prepared)
    if prepared.stream:
        # Use `partial`: a closure would take 350 more bytes for each open stream.
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

"""POST /v1/chat/completions and POST /v1/completions."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from fastapi import Request
from pydantic import BaseModel
from starlette.responses import Response

from gateway.api.answer_schemas import (
    ChatCompletion,
    ChatCompletionChunk,
    Completion,
    CompletionChunk,
    Error,
)
from gateway.api.answers import Answer, Collector
from gateway.api.auth import tenant_of
from gateway.api.chunks import Kind, UsageFrames
from gateway.api.failures import status_of
from gateway.api.intake import Intake
from gateway.api.logprobs import chat_logprobs, completion_logprobs, prompt_logprobs
from gateway.api.parameters import parse
from gateway.api.rate_headers import rate_headers
from gateway.api.request_log import Handler, context_of
from gateway.api.routing import BODY, Router, Schema, needs, reference, refusals
from gateway.api.schemas import (
    ChatCompletionRequest,
    CompletionRequest,
    GenerationRequest,
)
from gateway.api.sse import EventBody, EventStream, cancel_on_disconnect
from gateway.config.tenants import Tenant
from gateway.errors import InvalidRequest, UnsupportedParameter
from gateway.generation import Batch, Caller
from gateway.parsers import harmony
from gateway.parsers.message import MessageForm
from gateway.parsers.reasoning import is_open
from gateway.parsers.tools.ids import TemplateIds
from gateway.pipeline.generate import generate
from gateway.pipeline.prepare import Prompt, prepare
from gateway.service import Service
from gateway.tenancy.accounting import Account
from gateway.tenancy.limits.reservation import Reservation
from gateway.tokenization.chat_format import ChatFormat

router = Router()

# To write them takes 5 ms at most, as the event loop's other work does.
_FEW_LOG_PROBABILITIES = 100

_Turn = AbstractAsyncContextManager[object]

_Prompts = tuple[Sequence[Prompt], MessageForm | None]
"""The prompts of a request, and how to read the answer; None when it is plain text."""


def _answers(answer: type[BaseModel], chunk: type[BaseModel]) -> dict[str, Any]:
    """How the answers of a generation are described; of a stream, one event.

    After the first one there is no status left to tell of an error.
    """
    data: Schema = {
        "type": "string",
        "contentMediaType": "application/json",
        "contentSchema": {"anyOf": [reference(chunk), reference(Error)]},
    }
    done = {"const": "[DONE]", "description": "The last event."}
    event = {
        "type": "object",
        "required": ["data"],
        "properties": {"data": {"anyOf": [done, data]}},
    }
    streamed = {"content": {"text/event-stream": {"schema": event}}}
    refused = refusals(*BODY, 401, 403, 404, 429, 503, 504)
    return {"response_model": answer, "responses": {200: streamed, **refused}}


@router.post(
    "/v1/chat/completions",
    summary="Answers a conversation.",
    openapi_extra=needs("api_key", optional=True, json=ChatCompletionRequest),
    **_answers(ChatCompletion, ChatCompletionChunk),
)
async def chat_completions(request: Request) -> Response:
    return await _answer(request, await _prepared_chat(request))


@router.post(
    "/v1/completions",
    summary="Continues a text.",
    openapi_extra=needs("api_key", optional=True, json=CompletionRequest),
    **_answers(Completion, CompletionChunk),
)
async def completions(request: Request) -> Response:
    return await _answer(request, await _prepared_completion(request))


HOT: Mapping[str, Handler] = {
    "/v1/chat/completions": chat_completions,
    "/v1/completions": completions,
}
"""The endpoints whose POSTs are answered in front of FastAPI, by path."""


@dataclass(slots=True)
class _Prepared:
    """What is left of a request that may run: of a body of megabytes, the token ids."""

    batch: Batch
    account: Account
    adapter_version: str | None
    answer: Answer
    keep: int | None
    stream: bool
    usage: UsageFrames
    hints: tuple[str, ...] = ()


async def _prepared_chat(request: Request) -> _Prepared:
    service: Service = request.app.state.service
    tenant, strict = tenant_of(request), service.settings.strict_parameters
    async with Intake(request, tenant) as intake:
        # One too many is refused before anything is read or worked out for it.
        with await service.accounting.count(tenant, places=1) as reservation:
            wanted, hints = await intake.read(partial(parse, ChatCompletionRequest, strict=strict))
            if wanted.continue_final_message and wanted.add_generation_prompt:
                raise InvalidRequest(
                    "continue_final_message excludes add_generation_prompt.",
                    param="continue_final_message",
                )
            prompts = partial(_rendered, wanted)
            prepared = await _prepare(
                "chat", request, tenant, intake, reservation, wanted, 1, prompts
            )
            prepared.hints = hints
            return prepared


async def _prepared_completion(request: Request) -> _Prepared:
    service: Service = request.app.state.service
    tenant, strict = tenant_of(request), service.settings.strict_parameters
    async with Intake(request, tenant) as intake:
        with await service.accounting.count(tenant, places=1) as reservation:
            wanted, hints = await intake.read(partial(parse, CompletionRequest, strict=strict))
            prompts = wanted.prompts
            prepared = await _prepare(
                "completion",
                request,
                tenant,
                intake,
                reservation,
                wanted,
                len(prompts),
                lambda _: (prompts, None),
            )
            prepared.hints = hints
            return prepared


def _rendered(wanted: ChatCompletionRequest, chat: ChatFormat) -> _Prompts:
    ids = TemplateIds(chat.tool_form)
    messages = [message.for_template(ids) for message in wanted.messages]
    extra = dict(wanted.chat_template_kwargs or {})
    if wanted.reasoning_effort is not None:
        extra["reasoning_effort"] = wanted.reasoning_effort
    # A guide holds from the first token on: there is no room for thoughts before the answer.
    guided = wanted.guide()[0] is not None
    prompt = chat.render(
        messages,
        wanted.offered_tools,
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
    if wanted.offered_tools:
        tools = chat.tool_form
        if tools is None and wanted.forced is None:
            raise UnsupportedParameter(
                "This model's chat template teaches no known form of tool calls; "
                "GATEWAY_TOOL_FORM can name one.",
                param="tools",
            )
    reasoning = None if guided else chat.reasoning_tags
    channel = None
    if chat.tool_form == "openai" and not guided:
        channel = harmony.begun(prompt)
    if tools is None and reasoning is None and channel is None and wanted.forced is None:
        return None
    return MessageForm(
        tools=tools,
        functions={tool.function.name: tool.function.parameters for tool in wanted.tools or ()},
        forced=wanted.forced,
        parallel=wanted.parallel_tool_calls is not False,
        reasoning=reasoning,
        reasoning_open=reasoning is not None and is_open(prompt, reasoning),
        channel=channel,
    )


async def _prepare(
    kind: Kind,
    request: Request,
    tenant: Tenant | None,
    intake: Intake,
    reservation: Reservation,
    wanted: GenerationRequest,
    several: int,
    prompts: Callable[[ChatFormat], _Prompts],
) -> _Prepared:
    """`prompts` works out the prompts, `several` is how many there are.

    `reservation` has the request counted, and its first place.
    """
    service: Service = request.app.state.service
    route = service.access.route(service.router, tenant, wanted.model)
    places, limit = _places(tenant, wanted, several), _output_limit(tenant, wanted)
    timeout_s = _timeout(request, service.settings.request_timeout)
    await reservation.take_more(places - 1)
    chat = service.prompts.chat_of(route.chat_template)
    given, message = await intake.work(partial(prompts, chat))
    caller = Caller(
        tenant=tenant.name if tenant else "",
        priority=tenant.priority if tenant else 0,
        timeout_s=timeout_s,
        billed=tenant is not None or service.settings.usage_log is not None,
        apart=tenant is not None and not service.settings.tenants_trust_each_other,
        guides=tenant.guides if tenant else "checked",
    )
    lora = route.lora
    if lora is not None:
        lora = replace(lora, turn=partial(_cold_send, service, caller, lora.nbytes))
    options = wanted.options(lora, message, caller)
    if limit != options.max_tokens:
        options = replace(options, max_tokens=limit)
    if chat.stop_ids and not options.ignore_eos:
        ends = (*options.stop_token_ids, *chat.stop_ids)
        options = replace(options, stop_token_ids=ends)
    context = context_of(request.scope)
    context.model, context.adapter_version = service.settings.model_name, route.version
    batch = await prepare(service, given, options, chat=kind == "chat")
    context.batch = batch
    logprobs = None
    if wanted.alternatives is not None:
        form = chat_logprobs if kind == "chat" else completion_logprobs
        as_ids = bool(wanted.return_tokens_as_token_ids)
        logprobs = partial(form, prompts=service.prompts, as_ids=as_ids)
    of_prompt = None
    if options.prompt_logprobs is not None:
        of_prompt = partial(prompt_logprobs, prompts=service.prompts, count=options.prompt_logprobs)
    answer = Answer(
        kind,
        wanted.model,
        batch,
        logprobs,
        prompt_logprobs=of_prompt,
        token_ids=bool(wanted.return_token_ids),
        echo=wanted.echoed,
    )
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
    return _Prepared(
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
    cost = min(nbytes, sends.largest or nbytes)
    return sends.permit(caller.tenant, caller.priority, cost=cost)


async def _answer(request: Request, prepared: _Prepared) -> Response:
    service: Service = request.app.state.service
    context = context_of(request.scope)
    batch, account, answer = prepared.batch, prepared.account, prepared.answer
    headers = rate_headers(account.quotas)
    if prepared.adapter_version:
        headers["x-adapter-version"] = prepared.adapter_version
    if prepared.hints:
        headers["x-ignored-parameters"] = ", ".join(prepared.hints)
    if prepared.stream:
        usage = prepared.usage

        async def write(body: EventBody) -> None:
            if service.settings.keep_alive_in_queue:
                body.expect()
            sink = answer.stream(body, usage)
            # Not before it is its turn: behind a comment no refusal by the queue is a 503.
            await generate(service, context, batch, sink, on_place=body.expect)

        return EventStream(write, headers, service.settings.keep_alive, account)
    collector = Collector(batch.choices)
    async with account, cancel_on_disconnect(request.scope):
        await generate(service, context, batch, collector)
        collect = partial(answer.collected, collector.received, keep=prepared.keep)
        if answer.log_probabilities(collector.received) <= _FEW_LOG_PROBABILITIES:
            body = collect()
        else:
            body = await service.logits.run(batch.caller.tenant, 0, collect)
    return Response(body, media_type="application/json", headers=headers)


def _places(tenant: Tenant | None, wanted: GenerationRequest, prompts: int) -> int:
    """What a request takes of `concurrent_requests`: one for each sequence that is generated.

    Raises InvalidRequest for more than the tenant may have at once.
    """
    sequences = wanted.sequences
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


def _timeout(request: Request, most_s: float) -> float | None:
    """Seconds, from the header x-request-timeout, where they are fewer than all have.

    Raises InvalidRequest.
    """
    given = request.headers.get("x-request-timeout")
    if given is None:
        return None
    try:
        seconds = float(given)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < math.inf:
        raise InvalidRequest(
            f"x-request-timeout: found {given!r}; allowed: a number of seconds above 0.",
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
        raise InvalidRequest(f"{param}: found {asked}; this key allows {allowed}.", param=param)
    return asked

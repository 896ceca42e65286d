"""POST /tokenize and POST /detokenize, as vLLM has them."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Request
from pydantic import Field
from starlette.responses import JSONResponse, Response

from gateway.api.auth import tenant_of
from gateway.api.body import read_json
from gateway.api.messages import Messages, Strict, Tools
from gateway.api.schemas import MAX_IDS, TokenId
from gateway.errors import InvalidRequest
from gateway.service import Service


class TokenizeRequest(Strict):
    """A `prompt`, or `messages` for the chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    tools: Tools | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool = False


class DetokenizeRequest(Strict):
    model: str | None = None
    tokens: Annotated[list[TokenId], Field(fail_fast=True, max_length=MAX_IDS)]


async def tokenize(request: Request) -> Response:
    service: Service = request.app.state.service
    tenant = tenant_of(request)
    wanted = await read_json(request, TokenizeRequest, service.settings.max_body_bytes)
    if wanted.model is not None:
        service.access.route(service.router, tenant, wanted.model)
    text = _text(service, wanted)
    special = wanted.add_special_tokens
    if special is None:
        special = wanted.messages is None  # a chat template writes its own
    ids = await service.prompts.encode(text, add_special_tokens=special)
    strings = None
    if wanted.return_token_strs:
        strings = [service.prompts.tokenizer.id_to_token(token_id) for token_id in ids]
    return JSONResponse(
        {
            "count": len(ids),
            "max_model_len": service.replicas.capabilities.max_seq_len,
            "tokens": ids,
            "token_strs": strings,
        }
    )


def _text(service: Service, wanted: TokenizeRequest) -> str:
    if wanted.prompt is not None and wanted.messages is None:
        return wanted.prompt
    if wanted.messages is None or wanted.prompt is not None:
        raise InvalidRequest("Give either prompt or messages.", param="prompt")
    form = service.prompts.tool_form
    return service.prompts.render(
        [message.for_template(form) for message in wanted.messages],
        [tool.model_dump(exclude_none=True) for tool in wanted.tools or ()] or None,
        wanted.chat_template_kwargs,
        open_turn=wanted.add_generation_prompt,
        go_on=wanted.continue_final_message,
    )


async def detokenize(request: Request) -> Response:
    service: Service = request.app.state.service
    tenant = tenant_of(request)
    wanted = await read_json(request, DetokenizeRequest, service.settings.max_body_bytes)
    if wanted.model is not None:
        service.access.route(service.router, tenant, wanted.model)
    size = service.prompts.vocab_size
    if max(wanted.tokens, default=0) >= size:
        raise InvalidRequest(f"tokens: token ids must be 0 to {size - 1}.", param="tokens")
    text = service.prompts.tokenizer.decode(wanted.tokens, skip_special_tokens=False)
    return JSONResponse({"prompt": text})

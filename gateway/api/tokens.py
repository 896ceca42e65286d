"""POST /tokenize and POST /detokenize, as vLLM has them."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, Field

from gateway.api.answer_schemas import Count
from gateway.api.auth import Caller, Running
from gateway.api.body import json_body
from gateway.api.messages import Messages, Strict, Tools
from gateway.api.routing import BODY, Router, needs, refusals
from gateway.api.schemas import MAX_IDS, TokenId
from gateway.errors import InvalidRequest
from gateway.service import Service

router = Router()


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


class Tokens(BaseModel):
    count: Count
    max_model_len: Count
    tokens: list[Count]
    token_strs: list[str | None] | None


class Text(BaseModel):
    prompt: str


@router.post(
    "/tokenize",
    summary="Text, or a conversation, to token ids.",
    responses=refusals(*BODY, 401, 403, 404, 503),
    openapi_extra=needs("api_key", optional=True, json=TokenizeRequest, empty=True),
)
async def tokenize(
    service: Running,
    tenant: Caller,
    wanted: Annotated[TokenizeRequest, json_body(TokenizeRequest)],
) -> Tokens:
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
    return Tokens(
        count=len(ids),
        max_model_len=service.replicas.capabilities.max_seq_len,
        tokens=ids,
        token_strs=strings,
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


@router.post(
    "/detokenize",
    summary="Token ids to text.",
    responses=refusals(*BODY, 401, 403, 404, 503),
    openapi_extra=needs("api_key", optional=True, json=DetokenizeRequest),
)
async def detokenize(
    service: Running,
    tenant: Caller,
    wanted: Annotated[DetokenizeRequest, json_body(DetokenizeRequest)],
) -> Text:
    if wanted.model is not None:
        service.access.route(service.router, tenant, wanted.model)
    size = service.prompts.vocab_size
    if max(wanted.tokens, default=0) >= size:
        raise InvalidRequest(f"tokens: token ids must be 0 to {size - 1}.", param="tokens")
    text = service.prompts.tokenizer.decode(wanted.tokens, skip_special_tokens=False)
    return Text(prompt=text)

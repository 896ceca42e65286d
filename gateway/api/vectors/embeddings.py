"""POST /v1/embeddings in OpenAI's format (API reference, "Create embeddings", 2026)."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Literal

import orjson
from fastapi import Request
from pydantic import Field, StringConstraints
from starlette.responses import Response

from gateway.api.answer_schemas import Count, Described
from gateway.api.field_types import JsonInt, TokenIds
from gateway.api.routing import BODY, ApiRouter, needs, refusals
from gateway.api.sse import cancel_on_disconnect
from gateway.api.successors import OF_EMBEDDINGS
from gateway.api.vectors.answers import (
    MAX_INLINE_NUMBERS,
    LargeAnswer,
    estimate_bytes,
    write_embeddings,
)
from gateway.api.vectors.mapped_requests import MappedCall, MappedRequest, prepare_call
from gateway.catalog.mapped import ServedModel
from gateway.config.mapped import EmbeddingModel
from gateway.errors import InvalidRequest
from gateway.pipeline.mapped_inputs import (
    MappedInputs,
    Vectors,
    check_ids,
    encode_texts,
    shape_vectors,
)
from gateway.service import Service

router = ApiRouter()

MAX_INPUTS = 2048
"""Maximum number of inputs, the same as OpenAI's."""
_DEFAULT_WIDTH = 1536
# Maximum result of `estimate_bytes` for embeddings that need no share of the memory budget. The
# request itself takes about as much memory as such embeddings.
_MAX_UNBUDGETED_BYTES = 1 << 20

_Text = Annotated[str, StringConstraints(min_length=1)]


class EmbeddingsRequest(MappedRequest):
    """A request for embeddings.

    `input` is a text, a list of texts, a list of token ids, or a list of lists of token ids.
    """

    successors = OF_EMBEDDINGS

    input: (
        _Text
        | Annotated[list[_Text], Field(fail_fast=True, min_length=1, max_length=MAX_INPUTS)]
        | TokenIds
        | Annotated[list[TokenIds], Field(fail_fast=True, min_length=1, max_length=MAX_INPUTS)]
    )
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: JsonInt | None = Field(None, ge=1, le=2**16)

    @property
    def texts(self) -> list[str] | None:
        """The input texts; None if the inputs are token ids."""
        if isinstance(self.input, str):
            return [self.input]
        return [each for each in self.input if isinstance(each, str)] or None

    @property
    def ids(self) -> list[list[int]]:
        assert not isinstance(self.input, str)
        single = [each for each in self.input if isinstance(each, int)]
        return [single] if single else [each for each in self.input if isinstance(each, list)]


class InputUsage(Described):
    """The number of input tokens. Both members have the same value, as in OpenAI's format.

    They are 0 if the gateway cannot count the tokens, because the model tokenizes the texts itself.
    """

    prompt_tokens: Count
    total_tokens: Count


class Embedding(Described):
    object: Literal["embedding"]
    index: Count
    embedding: Annotated[
        list[float] | str,
        Field(description="Numbers, or with `base64` little-endian float32."),
    ]


class Embeddings(Described):
    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: InputUsage


@router.post(
    "/v1/embeddings",
    summary="Create embeddings of texts.",
    response_model=Embeddings,
    responses=refusals(*BODY, 401, 403, 404, 429, 502, 503, 504),
    openapi_extra=needs("api_key", optional=True, json=EmbeddingsRequest),
)
async def embeddings(request: Request) -> Response:
    asked = await prepare_call(
        request, EmbeddingsRequest, lambda service: service.embedders, _build_inputs
    )
    async with asked.account, cancel_on_disconnect(request.scope):
        return await _build_response(asked)


async def _build_inputs(
    service: Service, model: ServedModel[EmbeddingModel], wanted: EmbeddingsRequest, tenant: str
) -> MappedInputs:
    if wanted.dimensions is not None and not model.entry.dimensions:
        raise InvalidRequest(
            f"dimensions: the embeddings of `{model.name}` are not to be cut.", param="dimensions"
        )
    if (texts := wanted.texts) is None:
        return await check_ids(service, model, wanted.ids, tenant=tenant)
    pairs = [(text,) for text in texts]
    return await encode_texts(service, model, pairs, tenant=tenant, param="input")


async def _build_response(asked: MappedCall[EmbeddingsRequest, EmbeddingModel]) -> Response:
    service, wanted = asked.service, asked.wanted
    as_base64 = wanted.encoding_format == "base64"
    found = await asked.find_model("input")
    width = found.width or _DEFAULT_WIDTH
    size = estimate_bytes(len(asked.inputs.rows), width, as_base64=as_base64)
    if size <= _MAX_UNBUDGETED_BYTES:
        return LargeAnswer(
            await _write_pieces(asked, await asked.run(found), as_base64=as_base64), asked.headers
        )
    budget = service.vector_budget
    cost = min(size, budget.max_cost() or size)
    permit = budget.permit(
        asked.tenant_name, asked.priority, cost=cost, wait_s=asked.deadline.remaining_s
    )
    try:
        await permit.__aenter__()
    except TimeoutError:
        raise asked.deadline.timeout_error() from None
    try:
        pieces = await _write_pieces(asked, await asked.run(found), as_base64=as_base64)
    except BaseException:
        permit.release()
        raise
    return LargeAnswer(pieces, asked.headers, permit.release)


async def _write_pieces(
    asked: MappedCall[EmbeddingsRequest, EmbeddingModel], answers: list[Vectors], *, as_base64: bool
) -> list[bytes]:
    """Return the JSON body in pieces, to be sent one by one. The list `answers` is emptied."""
    entry, wanted = asked.model.entry, asked.wanted
    pieces, first = [b'{"object":"list","data":['], 0
    answers.reverse()
    while answers:
        # `pop` frees each array once it is encoded.
        rows = shape_vectors(answers.pop(), wanted.dimensions, normalize=entry.normalize)
        write = partial(write_embeddings, rows, first, as_base64=as_base64)
        if rows.size <= MAX_INLINE_NUMBERS:
            pieces.append(write())
        else:
            pieces.append(await asked.service.logits.run(asked.tenant_name, 0, write))
        first += len(rows)
        if answers:
            pieces.append(b",")
    tokens = asked.inputs.total
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    tail = orjson.dumps({"model": wanted.model, "usage": usage})
    pieces.append(b"]," + tail[1:])
    return pieces

"""POST /v1/embeddings, as OpenAI has it (API reference, "Create embeddings", 2026)."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Literal

import orjson
from fastapi import Request
from pydantic import Field, StringConstraints
from starlette.responses import Response

from gateway.api.answer_schemas import Count, Described
from gateway.api.field_types import TokenIds, Whole
from gateway.api.mapped import Asking, MappedRequest, asking
from gateway.api.routing import BODY, Router, needs, refusals
from gateway.api.sse import cancel_on_disconnect
from gateway.api.successors import OF_EMBEDDINGS
from gateway.api.vector_answers import FEW_NUMBERS, LargeAnswer, nbytes, written
from gateway.catalog.mapped import ServedModel
from gateway.config.mapped import EmbeddingModel
from gateway.errors import InvalidRequest
from gateway.pipeline.mapped import Inputs, Vectors, of_ids, of_texts, shaped
from gateway.service import Service

router = Router()

MAX_INPUTS = 2048
"""As at OpenAI."""
_UNKNOWN_WIDTH = 1536
# What fits below it is in memory anyway, as long as the request is.
_SMALL = 1 << 20

_Text = Annotated[str, StringConstraints(min_length=1)]


class EmbeddingsRequest(MappedRequest):
    """`input`: one text, several, the token ids of one, or the token ids of several."""

    successors = OF_EMBEDDINGS

    input: (
        _Text
        | Annotated[list[_Text], Field(fail_fast=True, min_length=1, max_length=MAX_INPUTS)]
        | TokenIds
        | Annotated[list[TokenIds], Field(fail_fast=True, min_length=1, max_length=MAX_INPUTS)]
    )
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Whole | None = Field(None, ge=1, le=2**16)

    @property
    def texts(self) -> list[str] | None:
        """None where they are token ids."""
        if isinstance(self.input, str):
            return [self.input]
        return [each for each in self.input if isinstance(each, str)] or None

    @property
    def ids(self) -> list[list[int]]:
        assert not isinstance(self.input, str)
        single = [each for each in self.input if isinstance(each, int)]
        return [single] if single else [each for each in self.input if isinstance(each, list)]


class InputUsage(Described):
    """0 for a model whose tokens nobody counts: one of texts, without a tokenizer."""

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
    summary="Vectors of texts.",
    response_model=Embeddings,
    responses=refusals(*BODY, 401, 403, 404, 429, 502, 503, 504),
    openapi_extra=needs("api_key", optional=True, json=EmbeddingsRequest),
)
async def embeddings(request: Request) -> Response:
    asked = await asking(request, EmbeddingsRequest, lambda service: service.embedders, _inputs)
    async with asked.account, cancel_on_disconnect(request.scope):
        return await _answer(asked)


async def _inputs(
    service: Service, model: ServedModel[EmbeddingModel], wanted: EmbeddingsRequest, tenant: str
) -> Inputs:
    if wanted.dimensions is not None and not model.entry.dimensions:
        raise InvalidRequest(
            f"dimensions: the embeddings of `{model.name}` are not to be cut.", param="dimensions"
        )
    if (texts := wanted.texts) is None:
        return await of_ids(service, model, wanted.ids, tenant=tenant)
    pairs = [(text,) for text in texts]
    return await of_texts(service, model, pairs, tenant=tenant, param="input")


async def _answer(asked: Asking[EmbeddingsRequest, EmbeddingModel]) -> Response:
    service, wanted = asked.service, asked.wanted
    as_base64 = wanted.encoding_format == "base64"
    found = await asked.found("input")
    width = found.width or _UNKNOWN_WIDTH
    size = nbytes(len(asked.inputs.rows), width, as_base64=as_base64)
    if size <= _SMALL:
        return LargeAnswer(
            await _pieces(asked, await asked.rows(found), as_base64=as_base64), asked.headers
        )
    room = service.vectors
    cost = min(size, room.max_cost() or size)
    permit = room.permit(asked.tenant_name, asked.priority, cost=cost, wait_s=asked.deadline.left_s)
    try:
        await permit.__aenter__()
    except TimeoutError:
        raise asked.deadline.missed() from None
    try:
        pieces = await _pieces(asked, await asked.rows(found), as_base64=as_base64)
    except BaseException:
        permit.release()
        raise
    return LargeAnswer(pieces, asked.headers, permit.release)


async def _pieces(
    asked: Asking[EmbeddingsRequest, EmbeddingModel], answers: list[Vectors], *, as_base64: bool
) -> list[bytes]:
    """The body."""
    entry, wanted = asked.model.entry, asked.wanted
    pieces, first = [b'{"object":"list","data":['], 0
    answers.reverse()
    while answers:
        # Nothing else keeps them.
        rows = shaped(answers.pop(), wanted.dimensions, normalize=entry.normalize)
        write = partial(written, rows, first, as_base64=as_base64)
        if rows.size <= FEW_NUMBERS:
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

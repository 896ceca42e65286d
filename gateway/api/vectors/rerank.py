"""POST /v1/rerank, in the format that Jina, Cohere and other servers use."""

from __future__ import annotations

from typing import Annotated, Any

import orjson
from fastapi import Request
from pydantic import Field, StringConstraints, Tag
from starlette.responses import Response

from gateway.api.answer_schemas import Described
from gateway.api.field_types import JsonInt
from gateway.api.openai.messages import Strict
from gateway.api.routing import BODY, ApiRouter, needs, refusals
from gateway.api.sse import cancel_on_disconnect
from gateway.api.vectors.embeddings import MAX_INPUTS, InputUsage
from gateway.api.vectors.mapped_requests import MappedRequest, prepare_call
from gateway.catalog.mapped import ServedModel
from gateway.config.mapped import RerankModel
from gateway.errors import InvalidRequest
from gateway.pipeline.mapped_inputs import MappedInputs, encode_texts, to_scores
from gateway.service import Service

router = ApiRouter()

# Maximum characters that the model reads for one request. The model reads each document together
# with the query, so the query counts once for each document.
_MAX_CHARS = 32 * 2**20

_Text = Annotated[str, StringConstraints(min_length=1)]


class Document(Strict):
    text: _Text


class RerankRequest(MappedRequest):
    query: _Text
    documents: Annotated[
        list[_Text | Annotated[Document, Tag("[document]")]],
        Field(fail_fast=True, min_length=1, max_length=MAX_INPUTS),
    ]
    top_n: JsonInt | None = Field(None, ge=1)
    return_documents: bool | None = None

    @property
    def texts(self) -> list[str]:
        return [each if isinstance(each, str) else each.text for each in self.documents]


class Ranked(Described):
    index: Annotated[int, Field(ge=0, description="The document's index in the request.")]
    relevance_score: float
    document: Annotated[Document | None, Field(description="With `return_documents`.")] = None


class Ranking(Described):
    """The documents by relevance, the most relevant first."""

    id: str
    model: str
    results: list[Ranked]
    usage: InputUsage


@router.post("/v2/rerank", include_in_schema=False)
@router.post("/rerank", include_in_schema=False)
@router.post(
    "/v1/rerank",
    summary="Rank documents by their relevance to a query.",
    response_model=Ranking,
    responses=refusals(*BODY, 401, 403, 404, 429, 502, 503, 504),
    openapi_extra=needs("api_key", optional=True, json=RerankRequest),
)
async def rerank(request: Request) -> Response:
    asked = await prepare_call(
        request, RerankRequest, lambda service: service.rankers, _build_inputs
    )
    wanted = asked.wanted
    async with asked.account, cancel_on_disconnect(request.scope):
        found = await asked.find_model("documents")
        values = to_scores(await asked.run(found), sigmoid=asked.model.entry.sigmoid)
    order = sorted(range(len(values)), key=lambda index: -values[index])[: wanted.top_n]
    results: list[dict[str, Any]] = [
        {"index": index, "relevance_score": values[index]} for index in order
    ]
    if wanted.return_documents:
        texts = wanted.texts
        for result in results:
            result["document"] = {"text": texts[result["index"]]}
    tokens = asked.inputs.total
    answer = {
        "id": f"rerank-{asked.id}",
        "model": wanted.model,
        "results": results,
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }
    return Response(orjson.dumps(answer), media_type="application/json", headers=asked.headers)


async def _build_inputs(
    service: Service, model: ServedModel[RerankModel], wanted: RerankRequest, tenant: str
) -> MappedInputs:
    texts = wanted.texts
    chars = len(wanted.query) * len(texts) + sum(map(len, texts))
    if chars > _MAX_CHARS:
        raise InvalidRequest(
            f"query: with each of {len(texts)} documents it makes {chars} characters; allowed: "
            f"{_MAX_CHARS}.",
            param="query",
        )
    pairs = [(wanted.query, text) for text in texts]
    return await encode_texts(service, model, pairs, tenant=tenant, param="documents")

"""An ordinary gateway for comparison: streaming chats, written without measuring and optimising.

    python -m bench.ordinary_gateway --port N --triton HOST:PORT --tokenizer DIR

The gateway uses FastAPI, tritonclient.grpc.aio with numpy, transformers for the prompt, the stream
decoder of the tokenizers library, a pydantic model per chunk, and sse-starlette. It has no
adapters, limits, tools or metrics, and never stops a request. A complete gateway with these
libraries would need even more CPU time.
"""

from __future__ import annotations

import argparse
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import tritonclient.grpc.aio as grpcclient
import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel
from sse_starlette import EventSourceResponse
from tokenizers.decoders import DecodeStream
from transformers import AutoTokenizer


class ChatMessage(BaseModel):
    role: str
    content: str


class ChatRequest(BaseModel):
    model: str
    messages: list[ChatMessage]
    max_tokens: int = 256
    temperature: float = 1.0
    seed: int = 0
    stream: bool = True


class Delta(BaseModel):
    role: str | None = None
    content: str | None = None


class ChunkChoice(BaseModel):
    index: int
    delta: Delta
    finish_reason: str | None = None


class ChatChunk(BaseModel):
    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChunkChoice]


def infer_inputs(chat: ChatRequest, ids: list[int]) -> list[grpcclient.InferInput]:
    values: dict[str, npt.NDArray[Any]] = {
        "input_ids": np.array([ids], np.int32),
        "input_lengths": np.array([[len(ids)]], np.int32),
        "request_output_len": np.array([[chat.max_tokens]], np.int32),
        "random_seed": np.array([[chat.seed]], np.uint64),
        "runtime_top_k": np.array([[1]], np.int32),
        "streaming": np.array([[True]], np.bool_),
    }
    kinds = {"int32": "INT32", "uint64": "UINT64", "bool": "BOOL"}
    inputs = []
    for name, value in values.items():
        inputs.append(grpcclient.InferInput(name, list(value.shape), kinds[value.dtype.name]))
        inputs[-1].set_data_from_numpy(value)
    return inputs


def create_app(triton: str, tokenizer_dir: str) -> FastAPI:
    tokenizer: Any = AutoTokenizer.from_pretrained(tokenizer_dir)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        app.state.triton = grpcclient.InferenceServerClient(triton)
        yield
        await app.state.triton.close()

    app = FastAPI(lifespan=lifespan)

    @app.get("/health/live")
    async def live() -> dict[str, str]:
        return {"status": "ok"}

    @app.post("/v1/chat/completions")
    async def chat(body: ChatRequest) -> EventSourceResponse:
        return EventSourceResponse(answer(body))

    async def answer(chat: ChatRequest) -> AsyncIterator[str]:
        messages = [message.model_dump() for message in chat.messages]
        prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        inputs = infer_inputs(chat, tokenizer.encode(prompt, add_special_tokens=False))
        id_, created = f"chatcmpl-{uuid.uuid4().hex}", int(time.time())

        def chunk(delta: Delta, finish: str | None = None) -> str:
            choice = ChunkChoice(index=0, delta=delta, finish_reason=finish)
            whole = ChatChunk(id=id_, created=created, model=chat.model, choices=[choice])
            return whole.model_dump_json(exclude_none=True)

        async def requests() -> AsyncIterator[dict[str, Any]]:
            yield {
                "model_name": "tensorrt_llm",
                "inputs": inputs,
                "outputs": [
                    grpcclient.InferRequestedOutput(name)
                    for name in ("output_ids", "sequence_length")
                ],
                "request_id": uuid.uuid4().hex,
                "enable_empty_final_response": True,
            }

        yield chunk(Delta(role="assistant", content=""))
        decoder = DecodeStream(skip_special_tokens=True)
        async for result, error in app.state.triton.stream_infer(requests()):
            if error is not None:
                raise error
            for token in result.as_numpy("output_ids").flatten():
                if text := decoder.step(tokenizer.backend_tokenizer, int(token)):
                    yield chunk(Delta(content=text))
            if result.get_response().parameters["triton_final_response"].bool_param:
                break
        yield chunk(Delta(), finish="length")
        yield "[DONE]"

    return app


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--triton", required=True)
    parser.add_argument("--tokenizer", required=True)
    options = parser.parse_args()
    app = create_app(options.triton, options.tokenizer)
    uvicorn.run(app, host="127.0.0.1", port=options.port, log_level="warning")


if __name__ == "__main__":
    main()

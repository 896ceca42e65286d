"""Reading prompt logits from a response in chunks, for any chunk boundaries."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import pytest
from tritonclient.grpc import service_pb2 as pb

from gateway.errors import EngineBroken, EngineUnavailable
from gateway.generation.engine_request import Generation
from gateway.triton.http2.call import PREFIX
from gateway.triton.logits import token_logprobs
from gateway.triton.prompt_logits import PromptLogitsReader

T = TypeVar("T")

VOCABULARY = 1000
IDS = list(range(100, 110))
ROWS = np.random.default_rng(0).normal(0, 3, (1, len(IDS), VOCABULARY)).astype(np.float32)


class Pieces:
    """A fake stream that yields `pieces` one by one, and then ends."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self._pieces = list(pieces)

    async def feed(self, take: Callable[[Sequence[bytes]], bool]) -> bool:
        while self._pieces:
            if not take([self._pieces.pop(0)]):
                return True
        return False

    async def read(self) -> bytes | None:
        raise AssertionError

    def cancel(self) -> None:
        raise AssertionError


async def _here(work: Callable[[], T]) -> T:
    return work()


def _cutter(pieces: Sequence[bytes], count: int = 2) -> PromptLogitsReader:
    asked = Generation(
        request_id="1",
        prompt_ids=array("i", IDS),
        max_tokens=1,
        seed=0,
        prompt_logprobs=count,
    )
    return PromptLogitsReader(Pieces(pieces), asked, _here)


def _response(*, before: bool = False) -> pb.ModelStreamInferResponse:
    """Return a response whose logits are the first tensor if `before`, and otherwise the last."""
    message = pb.ModelStreamInferResponse()
    response = message.infer_response
    response.id = "an id"
    response.parameters["triton_final_response"].bool_param = True
    tensors: dict[str, Any] = {
        "output_ids": ("INT32", [1, 1, 200], bytes(800)),
        "context_logits": ("FP32", ROWS.shape, ROWS.tobytes()),
        "sequence_length": ("INT32", [1, 1], b"\1\0\0\0"),
    }
    for name in sorted(tensors, reverse=not before):
        datatype, shape, raw = tensors[name]
        response.outputs.add(name=name, datatype=datatype, shape=shape)
        response.raw_output_contents.append(raw)
    return message


def _on_the_wire(message: pb.ModelStreamInferResponse) -> bytes:
    data = message.SerializeToString()
    return PREFIX.pack(0, len(data)) + data


def _cut(data: bytes, seed: int) -> list[bytes]:
    draw = random.Random(seed)
    places = sorted(draw.sample(range(1, len(data)), draw.choice([0, 1, 5, 500])))
    return [data[start:end] for start, end in zip([0, *places], [*places, len(data)], strict=True)]


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("seed", range(12))
async def test_wherever_it_is_cut(seed: int, before: bool) -> None:
    message = _response(before=before)
    other = pb.ModelStreamInferResponse(error_message="an error")
    cutter = _cutter(_cut(_on_the_wire(message) + _on_the_wire(other), seed))
    kept = await cutter.read()
    assert kept is not None
    assert len(kept) < 2000
    for at, tensor in enumerate(message.infer_response.outputs):
        if tensor.name == "context_logits":
            message.infer_response.raw_output_contents[at] = b""
    assert pb.ModelStreamInferResponse.FromString(kept) == message
    assert cutter.entries is not None
    first, *others = cutter.entries
    assert (first.token_id, first.logprob) == (IDS[0], None)
    raw = ROWS.tobytes()
    assert others == token_logprobs(raw, "FP32", VOCABULARY, IDS[1:], 2)
    second = await cutter.read()
    assert second == other.SerializeToString()
    assert await cutter.read() is None


async def test_a_response_without_logits_is_passed_on() -> None:
    message = _response()
    del message.infer_response.outputs[:], message.infer_response.raw_output_contents[:]
    cutter = _cutter([_on_the_wire(message)])
    assert pb.ModelStreamInferResponse.FromString(await cutter.read() or b"") == message
    assert cutter.entries is None


async def test_a_stream_that_ends_within_it() -> None:
    data = _on_the_wire(_response())
    for end in (3, 20, 900, len(data) - 1):
        with pytest.raises(EngineUnavailable):
            await _cutter([data[:end]]).read()


@pytest.mark.parametrize("data", [b"\1\0\0\0\1x", PREFIX.pack(0, 2) + b"\x08\1"])
async def test_what_is_no_response(data: bytes) -> None:
    with pytest.raises(EngineBroken):
        await _cutter([data]).read()

"""The llmapi model in a real tritonserver, once for each release that it can behave as."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from tests.support.triton_server import (
    Arrays,
    Reply,
    Server,
    long_model,
    serving,
)
from triton_repo.llmapi_repository import MAIN, V1_2, V1_3, render_llmapi

PROMPT = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
ANSWER = "The capital of France is Paris."
MODELS = {"main": MAIN, "line_1_3": V1_3, "release_1_2": V1_2}


@pytest.fixture(scope="module")
def triton(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("llmapi")
    model = long_model(folder)
    for name, behaves_as in MODELS.items():
        parameters = {"model": str(model), "behaves_as": behaves_as, "max_num_tokens": 4000}
        render_llmapi(folder / "repository", parameters, model=name)
    with serving(folder) as server:
        yield server


def inputs(text: str, **more: Any) -> Arrays:
    """Each input a tensor of one element, which is upstream's shape; arrays go as they are."""
    return {name: _tensor(name, value) for name, value in {"text_input": text, **more}.items()}


def _tensor(name: str, value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value
    if isinstance(value, str):
        return np.array([value.encode()], np.object_)
    if isinstance(value, bool):
        return np.array([value])
    if isinstance(value, float):
        return np.array([value], np.float32)
    return np.array([value], np.uint64 if name in ("lora_id", "sampling_param_seed") else np.int32)


def texts(replies: list[Reply]) -> list[str]:
    return [text_of(reply) for reply in replies if "text_output" in reply.outputs]


def text_of(reply: Reply, output: str = "text_output") -> str:
    assert reply.error is None, reply.error
    assert reply.outputs[output].shape == (1,)
    return reply.outputs[output][0].decode()


def test_a_stream_brings_the_whole_text_so_far(triton: Server) -> None:
    ask = inputs(
        PROMPT,
        streaming=True,
        sampling_param_max_tokens=20,
        return_finish_reason=True,
        return_stop_reason=True,
        return_cumulative_logprob=True,
    )
    replies = triton.ask(ask, "main")
    found = texts(replies)
    assert len(found) > 5
    assert all(later.startswith(earlier) for earlier, later in pairwise(found))
    assert found[-1] == ANSWER
    assert replies[-1].final
    assert [text_of(reply, "finish_reason") for reply in replies[-2:]] == ["None", "stop"]
    assert {text_of(reply, "stop_reason") for reply in replies} == {"None"}
    assert {text_of(reply, "cumulative_logprob") for reply in replies} == {"None"}

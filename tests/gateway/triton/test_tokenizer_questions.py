"""Requests to the preprocessing model that compare its tokenizer with the gateway's.

The requests fail, get no answer, or go to another model.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from array import array
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from tritonclient.grpc import model_config_pb2
from tritonclient.grpc import service_pb2 as pb

from gateway.errors import EngineUnavailable, EngineUnreachable
from gateway.tokenization.identity import TokenizerIdentity
from gateway.tokenization.prompts import Prompts
from gateway.triton import bytes_tensor
from gateway.triton.client import TritonClient
from gateway.triton.tokenizer.check import TokenizerCheck, TokenizerPolicy
from tests.support.fake_triton import FakeTriton, serving
from tests.support.in_process import ids_of, running, save_tokenizer

_WITHIN_S = 300.0


class Preprocessed(FakeTriton):
    """A fake Triton with a core model, and `preprocessing` with the tokenizer in `folder`."""

    def __init__(self, folder: Path) -> None:
        super().__init__(tokens=[65], fault=None, step=0)
        self._folder = folder
        self.models = {"tensorrt_llm", "preprocessing"}
        self.parameters: dict[str, str] = {}
        """Parameters of the core model."""
        self.ensemble_steps: tuple[str, ...] = ()
        self.asked = 0
        self.fails = 0
        """Number of requests that get an error; -1 for all."""
        self.silent = False
        self.shift = 0
        """Number added to each id, as if the tokenizer were a different one."""
        self.padding = 0
        """Number of padding ids before those of the text. REQUEST_INPUT_LEN does not count them."""
        self.datatype, self.cut = "INT32", 0

    async def ModelReady(self, request: Any, context: Any) -> pb.ModelReadyResponse:
        return pb.ModelReadyResponse(ready=request.name in self.models)

    async def ModelConfig(self, request: Any, context: Any) -> pb.ModelConfigResponse:
        if request.name == "tensorrt_llm":
            answer = await super().ModelConfig(request, context)
            for name, value in self.parameters.items():
                answer.config.parameters[name].string_value = value
            return answer
        config = model_config_pb2.ModelConfig(name=request.name, max_batch_size=4)
        if request.name == "ensemble":
            for step in self.ensemble_steps:
                config.ensemble_scheduling.step.add(model_name=step)
            return pb.ModelConfigResponse(config=config)
        config.backend = "python"
        config.input.add(name="QUERY", data_type="TYPE_STRING", dims=[1])
        config.input.add(name="REQUEST_OUTPUT_LEN", data_type="TYPE_INT32", dims=[1])
        config.input.add(name="BAD_WORDS_DICT", data_type="TYPE_STRING", dims=[-1])
        config.output.add(name="INPUT_ID", data_type="TYPE_INT32", dims=[-1])
        config.output.add(name="REQUEST_INPUT_LEN", data_type="TYPE_INT32", dims=[1])
        return pb.ModelConfigResponse(config=config)

    async def ModelInfer(self, request: Any, context: Any) -> pb.ModelInferResponse:
        self.asked += 1
        if self.silent:
            await asyncio.Event().wait()
        if self.fails:
            self.fails -= 1
            await context.abort(grpc.StatusCode.INTERNAL, "out of memory")
        contents = zip(request.inputs, request.raw_input_contents, strict=True)
        [text] = next(bytes_tensor.unpack(raw) for each, raw in contents if each.name == "QUERY")
        ids = [each + self.shift for each in ids_of(self._folder, text)]
        padded = array("i", [0] * self.padding + ids).tobytes()
        answer = pb.ModelInferResponse()
        answer.outputs.add(name="INPUT_ID", datatype=self.datatype, shape=[1, len(ids)])
        answer.raw_output_contents.append(padded[: len(padded) - self.cut])
        if self.padding:
            answer.outputs.add(name="REQUEST_INPUT_LEN", datatype="INT32", shape=[1, 1])
            answer.raw_output_contents.append(array("i", [len(ids)]).tobytes())
        return answer


@pytest.fixture
def triton(tmp_path: Path) -> Preprocessed:
    save_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "!", "pad_token": "?"}')
    return Preprocessed(tmp_path)


@contextlib.asynccontextmanager
async def started(folder: Path, triton: Preprocessed) -> AsyncIterator[Any]:
    """Start a gateway, and yield its engine before the first check."""
    async with (
        serving(triton) as endpoint,
        running(folder, endpoint, ready=False) as (_, service, _),
    ):
        [replica] = service.replicas
        yield replica.engine


async def until(met: Callable[[], object]) -> None:
    async with asyncio.timeout(_WITHIN_S):
        while not met():
            await asyncio.sleep(0.01)


def engine_of(folder: Path, **model: Any) -> str:
    """Write an engine folder whose config.json describes `model`. Return the folder's path."""
    folder.mkdir()
    config = {"pretrained_config": model, "build_config": {"max_seq_len": 64}}
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


async def test_the_same_ids_are_no_news(triton: Preprocessed, tmp_path: Path) -> None:
    async with started(tmp_path, triton) as engine:
        await until(lambda: engine.ready)
        assert engine.selection.warning is None
        assert triton.asked


async def test_padding_is_none_of_a_texts_ids(triton: Preprocessed, tmp_path: Path) -> None:
    triton.padding = 7
    async with started(tmp_path, triton) as engine:
        await until(lambda: engine.ready)
        assert engine.selection.warning is None
        assert triton.asked


@pytest.mark.parametrize(("datatype", "cut"), [("INT64", 0), ("INT32", 1), ("INT32", 10**6)])
async def test_an_answer_without_ids_is_a_failed_question(
    triton: Preprocessed, tmp_path: Path, datatype: str, cut: int
) -> None:
    triton.datatype, triton.cut = datatype, cut
    async with started(tmp_path, triton) as engine:
        await until(lambda: f"its INPUT_ID is {datatype} of " in (engine.why_not_ready or ""))
        assert not engine.ready


async def test_other_ids_keep_it_out(triton: Preprocessed, tmp_path: Path) -> None:
    triton.shift = 1
    async with started(tmp_path, triton) as engine:
        await until(lambda: "from number 0 on" in engine.why_not_ready)
        assert not engine.ready
        triton.shift = 0  # the model was reloaded with the right tokenizer
        await until(lambda: engine.ready)


async def test_a_question_that_fails_is_asked_again(triton: Preprocessed, tmp_path: Path) -> None:
    triton.fails, triton.shift = 1, 1
    async with started(tmp_path, triton) as engine:
        await until(lambda: "is not the tokenizer" in engine.why_not_ready)
        assert not engine.ready


async def test_one_that_always_fails_holds_nothing_up_and_is_reported(
    triton: Preprocessed, tmp_path: Path
) -> None:
    triton.fails = -1
    async with started(tmp_path, triton) as engine:
        await until(lambda: engine.ready)
        asked = triton.asked
        assert asked >= 3
        assert "'preprocessing' did not return the ids" in engine.selection.warning
        await until(lambda: triton.asked > asked)  # the check is repeated, without harm
        assert engine.ready
        triton.fails = 0
        await until(lambda: engine.selection.warning is None)


@pytest.mark.parametrize(("policy", "refused"), [("refuse", 9), ("warn", 2)])
async def test_one_that_is_silent_keeps_it_out_for_a_minute_and_is_reported(
    triton: Preprocessed, tmp_path: Path, policy: TokenizerPolicy, refused: int
) -> None:
    """The check refuses a silent model for longer if the policy is `refuse`.

    The model's answer is then the only way to find a difference.
    """
    async with started(tmp_path, triton) as engine, serving(triton) as endpoint:
        await until(lambda: engine.ready)
        client, prompts = TritonClient(endpoint), Prompts.load(tmp_path)
        own = TokenizerIdentity(tmp_path, prompts)
        check = TokenizerCheck(client, own, policy, answer_within_s=0.3)
        triton.silent = True
        serves = TokenizerCheck(client, own, policy, answer_within_s=0.3)
        odd = await serves.check("tensorrt_llm", engine.capabilities, ready=True)
        assert odd is not None, "one that serves already is left in"
        for _ in range(refused):
            with pytest.raises(EngineUnavailable, match="it is tried again"):
                await check.check("tensorrt_llm", engine.capabilities, ready=False)
        odd = await check.check("tensorrt_llm", engine.capabilities, ready=False)
        assert odd is not None
        assert "'preprocessing' did not return the ids" in odd
        triton.silent = False
        assert await check.check("tensorrt_llm", engine.capabilities, ready=True) is None
        await client.close()
        # A lost connection raises no doubt about the tokenizer, but makes the replica unavailable.
        with pytest.raises(EngineUnreachable):
            await serves.check("tensorrt_llm", engine.capabilities, ready=True)
        prompts.close()


async def test_one_that_comes_late_is_asked_then(triton: Preprocessed, tmp_path: Path) -> None:
    triton.models.remove("preprocessing")
    triton.shift = 1
    async with started(tmp_path, triton) as engine:
        await until(lambda: engine.ready)
        triton.models.add("preprocessing")
        await until(lambda: not engine.ready)
        assert "is not the tokenizer" in engine.why_not_ready


@pytest.mark.parametrize("steps", [("bert", "preprocessing"), ("tensorrt_llm", "before")])
async def test_which_model_is_asked_an_ensemble_says(
    triton: Preprocessed, tmp_path: Path, steps: tuple[str, ...]
) -> None:
    """The ensemble names the model to ask.

    A `preprocessing` model may belong to another engine, and this engine's may have another name.
    """
    triton.models |= {"ensemble", "before"} - {"before" if "bert" in steps else "preprocessing"}
    triton.models.discard("preprocessing" if "before" in steps else "")
    triton.ensemble_steps = steps
    triton.shift = 1
    async with started(tmp_path, triton) as engine:
        if "bert" in steps:
            await until(lambda: engine.ready)
            assert triton.asked == 0
        else:
            await until(lambda: "'before' makes" in engine.why_not_ready)


@pytest.mark.parametrize(
    ("model", "parameters", "why"),
    [
        ({"vocab_size": 0}, {}, None),
        ({}, {}, None),
        ({"vocab_size": 256}, {}, None),
        ({"vocab_size": 264}, {}, None),
        ({"vocab_size": 512}, {}, None),
        ({"vocab_size": 200}, {}, "has 256 tokens, the engine 200"),
        ({"vocab_size": 32_000}, {}, "has 256 tokens, the engine 32000"),
        ({"vocab_size": 256, "eos_token_id": [7, 8]}, {}, "config.json has end_id [7, 8]"),
        ({"vocab_size": 256, "eos_token_id": "<eos>"}, {}, None),
        ({"vocab_size": 256}, {"end_id": "7"}, "'tensorrt_llm' has end_id [7]"),
        ({"vocab_size": 256}, {"pad_id": "7"}, "'tensorrt_llm' has pad_id [7]"),
        ({"vocab_size": 256}, {"end_id": "${end_id}", "pad_id": "-1"}, None),
    ],
)
async def test_without_it_sizes_and_ids_are_compared(
    triton: Preprocessed,
    tmp_path: Path,
    model: dict[str, Any],
    parameters: dict[str, str],
    why: str | None,
) -> None:
    triton.models.remove("preprocessing")
    triton.parameters = {"engine_dir": engine_of(tmp_path / "engine", **model), **parameters}
    async with started(tmp_path, triton) as engine:
        if why is None:
            await until(lambda: engine.ready)
            assert engine.selection.warning is None
        else:
            await until(lambda: why in engine.why_not_ready)


async def test_a_broken_tokenizer_file_is_reported(triton: Preprocessed, tmp_path: Path) -> None:
    triton.models.remove("preprocessing")
    triton.parameters = {"tokenizer_dir": str(tmp_path / "broken")}
    (tmp_path / "broken").mkdir()
    async with started(tmp_path, triton) as engine:
        await until(lambda: engine.ready)
        assert f"{tmp_path / 'broken'} cannot be compared" in engine.selection.warning
        (tmp_path / "broken" / "tokenizer.json").write_text("{")
        await until(lambda: "is no tokenizer" in engine.selection.warning)

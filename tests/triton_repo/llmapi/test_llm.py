"""`LLM` on the CPU executor, called like TensorRT-LLM's LLM API."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from ops.commands.up import DEMO_ADAPTERS
from tests.support.llmapi_models import ENDLESS, build_synthetic
from tests.support.triton_server import MODEL
from triton_repo.cpu_executor import synthetic
from triton_repo.cpu_executor.llmapi.llm import LLM
from triton_repo.cpu_executor.llmapi.lora import LoRARequest
from triton_repo.cpu_executor.llmapi.outputs import RequestError
from triton_repo.cpu_executor.llmapi.sampling_params import SamplingParams

PROMPT = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
ANSWER = "The capital of France is Paris."


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    limits = {"max_seq_len": 1500, "max_batch_size": 4, "tensor_parallel_size": 2}
    with LLM(str(MODEL), max_num_tokens=None, lora_config=None, **limits) as llm:
        yield llm


def test_a_text_token_ids_and_a_mapping_are_prompts(llm: LLM) -> None:
    ids = llm.tokenizer.encode(PROMPT, special=True)
    for prompt in (PROMPT, ids, {"prompt": PROMPT}, {"prompt_token_ids": ids}):
        output = llm.generate(prompt)
        assert output.prompt_token_ids == ids
        assert output.outputs[0].text == ANSWER
        assert output.outputs[0].finish_reason == "stop"
    both = llm.generate([PROMPT, ids], SamplingParams(max_tokens=2))
    assert [output.outputs[0].text for output in both] == ["The capital"] * 2


async def test_each_step_of_a_stream_adds_to_the_text(llm: LLM) -> None:
    text, ids = "", []
    async for output in llm.generate_async(PROMPT, streaming=True):
        (completion,) = output.outputs
        text += completion.text_diff
        ids += completion.token_ids_diff
        assert (completion.text, completion.token_ids) == (text, ids)
    assert text == ANSWER
    assert output.finished


async def test_characters_of_several_tokens_come_whole(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    ids = tokenizer.encode("\N{SLIGHTLY SMILING FACE}").ids
    assert len(ids) > 2
    synthetic.build(tmp_path, vocab_size=4096, tokens=ids, first_token_ms=0)
    with LLM(str(tmp_path), str(MODEL)) as llm:
        for more, end in ((0, ""), (1, "\N{REPLACEMENT CHARACTER}")):
            params = SamplingParams(max_tokens=2 * len(ids) + more)
            steps = llm.generate_async(PROMPT, params, streaming=True)
            texts = [step.outputs[0].text async for step in steps]
            assert texts[-1] == 2 * "\N{SLIGHTLY SMILING FACE}" + end
            # A slow reader gets several steps in one, possibly all of them.
            assert set("".join(texts[:-1])) <= {"\N{SLIGHTLY SMILING FACE}"}


async def test_the_third_position_is_that_of_an_adapter(llm: LLM) -> None:
    """Check the third positional argument. Release 1.2's model.py passes `streaming` there, so its
    streams never start.
    """
    output = llm.generate_async(PROMPT, SamplingParams(), True)  # type: ignore[arg-type]
    steps = [step.finished async for step in output]
    assert steps == [True]


async def test_an_aborted_request_ends_cancelled(tmp_path: Path) -> None:
    params = SamplingParams(max_tokens=ENDLESS)
    steps = 0
    with LLM(str(build_synthetic(tmp_path))) as llm:
        async for output in llm.generate_async(PROMPT, params, streaming=True):
            steps += 1
            if steps == 1:
                output.abort()
    assert output.outputs[0].finish_reason == "cancelled"
    assert output.outputs[0].length < ENDLESS
    assert (await output) is output


async def test_requests_run_side_by_side(llm: LLM) -> None:
    outputs = [llm.generate_async(PROMPT, SamplingParams(max_tokens=n)) for n in (1, 3, 6)]
    texts = [output.outputs[0].text for output in await asyncio.gather(*map(aresult, outputs))]
    assert texts == ["The", "The capital of", "The capital of France is"]


async def aresult(output: Any) -> Any:
    return await output.aresult()


def test_a_stop_is_a_string_or_an_id_and_can_be_shown(llm: LLM) -> None:
    (capital,) = llm.tokenizer.encode(" capital", special=False)
    for stop in ({"stop": " capital"}, {"stop_token_ids": [capital]}):
        for shown, text in ((False, "The"), (True, "The capital")):
            params = SamplingParams(**stop, include_stop_str_in_output=shown)
            (completion,) = llm.generate(PROMPT, params).outputs
            assert (completion.text, completion.finish_reason) == (text, "stop")
            assert completion.stop_reason in (" capital", capital)


async def test_adapters_are_read_off_the_event_loop() -> None:
    """Check that a broken adapter fails only its own request, and that an abort is not lost."""
    read: list[str] = []

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and str(arguments[0]).endswith("adapter_model.safetensors"):
            read.append(threading.current_thread().name)

    sys.addaudithook(hook)
    limits = {"max_seq_len": 1500, "lora_config": {"max_lora_rank": 16}}
    with LLM(str(MODEL), max_num_tokens=None, **limits) as llm:
        ja = LoRARequest("ja", 1, str(DEMO_ADAPTERS / "ja"))
        output = llm.generate_async(PROMPT, lora_request=ja)
        assert await llm.generate_async(PROMPT, SamplingParams(max_tokens=1))
        assert (await output).finished
        assert read
        assert all(thread.startswith("adapters") for thread in read)
        broken = LoRARequest("none", 2, str(DEMO_ADAPTERS))
        with pytest.raises(RequestError, match=r"adapter_config\.json"):
            await llm.generate_async(PROMPT, lora_request=broken)
        zh = LoRARequest("zh", 3, str(DEMO_ADAPTERS / "zh"))
        endless = SamplingParams(max_tokens=1400, ignore_eos=True)
        left = llm.generate_async(PROMPT, endless, lora_request=zh)
        left.abort()
        assert (await left).outputs[0].finish_reason == "cancelled"


def test_what_the_engine_refuses_is_raised(llm: LLM) -> None:
    with pytest.raises(RequestError, match="EndId"):
        llm.generate(PROMPT, SamplingParams(end_id=99_999))
    with pytest.raises(ValueError, match="max_seq_len"):
        llm.generate([5] * 1500)
    adapter = LoRARequest("ja", 1, str(DEMO_ADAPTERS / "ja"))
    with pytest.raises(ValueError, match="without lora_config"):
        llm.generate(PROMPT, lora_request=adapter)
    with pytest.raises(ValueError, match="prompt_adapter_request"):
        llm.generate(PROMPT, prompt_adapter_request=1)
    with pytest.raises(ValueError, match="beam_width above 1 is not supported"):
        SamplingParams(beam_width=2)
    assert llm.generate(PROMPT, SamplingParams(beam_width=1, max_tokens=1)).outputs[0].text
    with pytest.raises(TypeError, match="logprobs"):
        SamplingParams(logprobs=1)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"speculative_config": {}}, "speculative_config"),
        ({"kv_cache_config": {"host_cache_size": 1}}, "kv_cache_config.host_cache_size"),
        ({"lora_config": {"lora_dir": []}}, "lora_config.lora_dir"),
    ],
)
def test_arguments_that_it_lacks_are_refused_by_name(arguments: Any, name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name}: not supported by the CPU executor"):
        LLM(str(MODEL), **arguments)

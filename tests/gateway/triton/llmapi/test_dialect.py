"""The gateway with the llmapi repository's model, which a fake server plays."""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from tokenizers import AddedToken, Tokenizer
from tokenizers.processors import TemplateProcessing

from gateway.config.tenants import key_hash
from gateway.triton import bytes_tensor
from tests.support.event_clock import EventClock
from tests.support.fake_llmapi import FakeLlmapi, Step, build_outputs, inputs_of
from tests.support.fake_triton import serving
from tests.support.in_process import ids_of, running, save_tokenizer

HELLO = (
    build_outputs("he"),
    build_outputs("hell"),
    build_outputs("hello"),
    build_outputs("hello, you", "stop"),
)


@pytest.fixture
def tokenizer_dir(tmp_path: Path) -> Path:
    save_tokenizer(tmp_path)
    config = {"eos_token": "!", "chat_template": "{{ messages[0].content }}"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return tmp_path


async def complete(tokenizer_dir: Path, servicer: FakeLlmapi, **body: Any) -> httpx.Response:
    async with (
        serving(servicer) as endpoint,
        running(tokenizer_dir, endpoint) as (client, _, _),
    ):
        return await client.post("/v1/completions", json={"model": "m", "prompt": "x"} | body)


def frames(response: httpx.Response) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


async def test_a_request_is_scalars_without_a_batch_dimension(tokenizer_dir: Path) -> None:
    servicer = FakeLlmapi(*HELLO)
    asked = {"temperature": 0.5, "top_p": 0.9, "max_tokens": 7, "presence_penalty": 1, "stop": "#"}
    response = await complete(tokenizer_dir, servicer, **asked)
    assert response.status_code == 200, response.text
    [request] = servicer.requests
    found = inputs_of(request)
    assert request.id
    assert found.pop("text_input") == ("BYTES", [1], bytes_tensor.pack(["x"]))
    assert found.pop("sampling_param_max_tokens") == ("INT32", [1], struct.pack("<i", 7))
    assert found.pop("sampling_param_temperature") == ("FP32", [1], struct.pack("<f", 0.5))
    assert found.pop("sampling_param_top_p") == ("FP32", [1], struct.pack("<f", 0.9))
    assert found.pop("sampling_param_presence_penalty") == ("FP32", [1], struct.pack("<f", 1))
    assert found.pop("sampling_param_top_k") == ("INT32", [1], bytes(4))
    datatype, shape, seed = found.pop("sampling_param_seed")
    assert (datatype, shape, len(seed)) == ("UINT64", [1], 8)
    assert seed != bytes(8)
    for name in (
        *("streaming", "sampling_param_exclude_input_from_output", "return_finish_reason"),
        *("return_stop_reason", "sampling_param_return_perf_metrics"),
    ):
        assert found.pop(name) == ("BOOL", [1], b"\1")
    assert not found  # in particular, no stop strings


@pytest.mark.parametrize(
    ("streams", "asked", "sent"),
    [
        (True, {}, False),
        # streaming lets the gateway stop the engine at the stop string
        (True, {"stop": "#"}, True),
        (True, {"stream": True}, True),
        (False, {}, False),
        (False, {"stop": "#"}, False),
        (False, {"stream": True}, False),
    ],
)
async def test_the_model_streams_only_what_somebody_reads_as_it_comes(
    tokenizer_dir: Path, streams: bool, asked: dict[str, Any], sent: bool
) -> None:
    servicer = FakeLlmapi(build_outputs("hello", "stop"), streams=streams)
    response = await complete(tokenizer_dir, servicer, **asked)
    assert response.status_code == 200, response.text
    [request] = servicer.requests
    assert inputs_of(request)["streaming"] == ("BOOL", [1], bytes([sent]))


@pytest.mark.parametrize(
    ("facts", "warned"),
    [
        ({}, True),
        ({"polls_ended": "true"}, True),
        ({"polls_ended": "false"}, False),
        ({"streams": False}, False),
        ({"decoupled": False}, False),
    ],
)
async def test_admins_are_told_once_of_a_model_that_may_end_triton(
    tokenizer_dir: Path, caplog: pytest.LogCaptureFixture, facts: dict[str, Any], warned: bool
) -> None:
    servicer = FakeLlmapi(build_outputs("hello", "stop"), **facts)
    tenant = {"name": "a", "keys": [key_hash("of-a")], "models": ["*"]}
    (tokenizer_dir / "gateway.yaml").write_text(json.dumps({"tenants": [tenant]}))
    fields = {"admin_key": "k" * 40, "config": tokenizer_dir / "gateway.yaml"}
    async with (
        serving(servicer) as endpoint,
        running(tokenizer_dir, endpoint, **fields) as (client, service, _),
    ):
        [replica] = service.replicas
        servicer.ready = False
        async with asyncio.timeout(300):
            while replica.ready:
                await asyncio.sleep(0.01)
            servicer.ready = True
            while not replica.ready:
                await asyncio.sleep(0.01)
        admin = {"authorization": "Bearer " + "k" * 40}
        found = (await client.get("/health/ready", headers=admin)).json()["engine"]
        assert ("Triton 2.51" in found["warning"]) is warned
        assert "GATEWAY_REPLICA_IN_FLIGHT" in found["warning"]  # both warnings are shown
        assert "engine" not in (await client.get("/health/ready")).json()
    told_of = [each for each in caplog.messages if "signal 11" in each]
    assert len(told_of) == warned


async def test_what_is_left_before_it_came_whole_is_charged(tokenizer_dir: Path) -> None:
    clock, usage = EventClock(), tokenizer_dir / "usage.jsonl"
    servicer = FakeLlmapi(None)
    async with (
        serving(servicer) as endpoint,
        running(tokenizer_dir, endpoint, usage_log=usage) as (client, _, _),
    ):
        for limit in (5, 50):
            asked = len(servicer.requests)
            body = {"model": "m", "prompt": "xyz", "max_tokens": limit}
            request = asyncio.create_task(client.post("/v1/completions", json=body))
            async with asyncio.timeout(300):
                while len(servicer.requests) == asked:
                    await asyncio.sleep(0.01)
                clock.leap(20)
                request.cancel()
                while len(usage.read_text().splitlines() if usage.exists() else ()) <= bool(asked):
                    await asyncio.sleep(0.01)
    lines = [json.loads(line) for line in usage.read_text().splitlines()]
    assert [line["completion_tokens"] for line in lines] == [5, 50]


@pytest.mark.parametrize(
    ("dead", "streams"),
    [(False, True), (True, True), (False, False)],
    ids=["works", "dead", "streamed of 1.2"],
)
async def test_what_meets_the_time_limit_before_it_came_whole_is_charged(
    tokenizer_dir: Path, dead: bool, streams: bool
) -> None:
    """A request that runs into the time limit is charged, unless the engine made no tokens at all.

    Otherwise long answers would be free.
    """
    clock, usage = EventClock(), tokenizer_dir / "usage.jsonl"
    servicer = FakeLlmapi(None, streams=streams)
    servicer.of_prompt["poison"] = ("Error generating request: it fails",)
    settings: dict[str, Any] = {"usage_log": usage, "request_timeout": 100}

    async def until(met: Callable[[], object]) -> None:
        async with asyncio.timeout(3600):
            while not met():
                await asyncio.sleep(0.01)

    async with (
        serving(servicer) as endpoint,
        running(tokenizer_dir, endpoint, **settings) as (client, service, _),
    ):
        [replica] = service.replicas
        body = {"model": "m", "prompt": "xyz", "max_tokens": 50, "stream": not streams}
        asked = client.post("/v1/completions", json=body, timeout=None)
        request = asyncio.create_task(asked)
        await until(lambda: servicer.requests)
        if dead:
            await client.post("/v1/completions", json=body | {"prompt": "poison"})
            # the third request is the gateway's probe
            await until(lambda: len(servicer.requests) == 3)
            clock.leap(61)
            await until(lambda: replica.engine.makes_no_tokens)
        answer = await clock.leap_once(lambda: True, request, 101)
        assert '"code":"timeout"' in answer.text
        await until(lambda: len(usage.read_text().splitlines() if usage.exists() else ()) > dead)
    line = json.loads(usage.read_text().splitlines()[-1])
    expected = (0, 0) if dead else (3, 50)
    assert (line["prompt_tokens"], line["completion_tokens"]) == expected


@pytest.mark.parametrize(
    "steps",
    [
        HELLO,
        (build_outputs("hello, you", "stop"),),
        (build_outputs("hello, y"), build_outputs("hello, you", "stop"), {}),
        (build_outputs("hello, you"), {}),
        (build_outputs("hell\ufffd"), build_outputs("hello, you"), build_outputs("hello, you")),
    ],
    ids=["as it grows", "in one piece", "reason before the end", "no reason", "mended"],
)
@pytest.mark.parametrize("stream", [True, False])
async def test_texts_so_far_become_deltas(
    tokenizer_dir: Path, steps: tuple[Step, ...], stream: bool
) -> None:
    servicer = FakeLlmapi(*steps)
    options = {"include_usage": True} if stream else None
    response = await complete(tokenizer_dir, servicer, stream=stream, stream_options=options)
    answers = frames(response) if stream else [response.json()]
    choices = [choice for answer in answers for choice in answer["choices"]]
    assert "".join(choice["text"] for choice in choices) == "hello, you"
    assert [c["finish_reason"] for c in choices if c["finish_reason"]] == ["stop"]
    assert answers[-1]["usage"]["completion_tokens"] == len("hello, you")
    assert servicer.stopped == []


@pytest.mark.parametrize("behind", [(), ({},)], ids=["at the end", "before it"])
async def test_the_engine_says_why_it_ended_and_what_it_had(
    tokenizer_dir: Path, behind: tuple[Step, ...]
) -> None:
    ended = build_outputs("hello", "length", kv_cache_reused_block="2", kv_cache_hit_rate="0.5")
    prompt = "x" * 40
    servicer = FakeLlmapi(ended, *behind)
    answer = (await complete(tokenizer_dir, servicer, prompt=prompt, max_tokens=9)).json()
    assert answer["choices"][0]["finish_reason"] == "length"
    # Special tokens do not show in the text, but the engine counts them: max_tokens was reached.
    assert answer["usage"]["completion_tokens"] == 9
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 40
    other = build_outputs("hello", "stop") | {"stop_reason": "17"}
    answer = (await complete(tokenizer_dir, FakeLlmapi(other, *behind), max_tokens=9)).json()
    assert answer["choices"][0]["finish_reason"] == "stop"
    # includes the end token, which `stop_reason` gives as a number
    assert answer["usage"]["completion_tokens"] == 6


@pytest.mark.parametrize("include", [True, False])
async def test_stop_strings_are_exact_and_stop_the_engine(
    tokenizer_dir: Path, include: bool
) -> None:
    servicer = FakeLlmapi(
        build_outputs("a."), build_outputs("a. b.c"), build_outputs("a. b.c.d"), None
    )
    body = {"stop": [".c.", "x"], "include_stop_str_in_output": include}
    answer = (await complete(tokenizer_dir, servicer, **body)).json()
    assert answer["choices"][0]["text"] == ("a. b.c." if include else "a. b")
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == len("a. b.c.")
    assert servicer.stopped == [servicer.requests[0].id]


async def test_the_oldest_dialect_is_left_by_a_reset_alone(tokenizer_dir: Path) -> None:
    """The model of tag v0.19.0 is stopped by a stream reset, as it has no stop requests.

    It has beams, but no metrics.
    """
    servicer = FakeLlmapi(build_outputs("a."), build_outputs("a. b"), None, streams=False)
    servicer.drop = ("stop", "sampling_param_return_perf_metrics")
    servicer.has = ("sampling_param_beam_width",)
    async with (
        serving(servicer) as endpoint,
        running(tokenizer_dir, endpoint) as (client, service, _),
    ):
        body = {"model": "m", "prompt": "x", "stop": ["b"]}
        answer = (await client.post("/v1/completions", json=body)).json()
        async with asyncio.timeout(300):
            while not servicer.cancelled:
                await asyncio.sleep(0.01)
        [capabilities] = service.replicas.capabilities
        assert capabilities.stop is None
        assert capabilities.stoppable
    assert answer["choices"][0]["text"] == "a. "
    [request] = servicer.requests
    assert servicer.cancelled == [request.id]
    assert servicer.stopped == []
    assert not inputs_of(request).keys() & {*servicer.drop, *servicer.has}


@pytest.mark.parametrize(
    ("changed", "settings", "why"),
    [
        ({"max_batch_size": 8}, {}, "max_batch_size 8"),
        ({}, {"max_seq_len": None}, "GATEWAY_MAX_SEQ_LEN"),
        ({}, {"triton_mode": "token"}, "llmapi repository"),
        ({"drop": ("sampling_param_max_tokens",)}, {"triton_mode": "llmapi"}, "not of the llmapi"),
        ({"drop": ("sampling_param_seed",)}, {}, "no input sampling_param_seed"),
    ],
)
async def test_what_cannot_be_driven_says_why(
    tokenizer_dir: Path, changed: dict[str, Any], settings: dict[str, Any], why: str
) -> None:
    servicer = FakeLlmapi(*HELLO)
    for name, value in changed.items():
        setattr(servicer, name, value)
    async with (
        serving(servicer) as endpoint,
        running(tokenizer_dir, endpoint, ready=False, **settings) as (client, service, _),
    ):
        async with asyncio.timeout(300):
            while why not in service.replicas.why_not_ready:
                await asyncio.sleep(0.01)
        assert (await client.get("/health/ready")).status_code == 503


async def test_without_decoupled_mode_nothing_streams(tokenizer_dir: Path) -> None:
    servicer = FakeLlmapi(build_outputs("hello", "stop"), decoupled=False)
    refused = await complete(tokenizer_dir, servicer, stream=True)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "stream")
    assert servicer.requests == []
    answer = (await complete(tokenizer_dir, servicer)).json()
    assert answer["choices"][0]["text"] == "hello"
    assert "streaming" not in inputs_of(servicer.requests[0])


async def test_what_begins_a_text_is_there_once(tokenizer_dir: Path) -> None:
    """The prompt begins with <s> once, although both the tokenizer and the template add it."""
    tokenizer = Tokenizer.from_file(str(tokenizer_dir / "tokenizer.json"))
    tokenizer.add_special_tokens(["<s>"])
    begin = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", begin)])
    tokenizer.save(str(tokenizer_dir / "tokenizer.json"))
    config = {"eos_token": "!", "chat_template": "<s>{{ messages[0].content }}"}
    (tokenizer_dir / "tokenizer_config.json").write_text(json.dumps(config))
    servicer = FakeLlmapi(*HELLO)
    async with (
        serving(servicer) as endpoint,
        running(tokenizer_dir, endpoint) as (client, _, _),
    ):
        body = {"model": "m", "messages": [{"role": "user", "content": "who?"}]}
        chat = (await client.post("/v1/chat/completions", json=body)).json()
        ids = {"model": "m", "prompt": [begin, *tokenizer.encode("who?").ids[1:]]}
        completion = (await client.post("/v1/completions", json=ids)).json()
    sent = [inputs_of(request)["text_input"][2] for request in servicer.requests]
    assert sent == [bytes_tensor.pack(["who?"])] * 2
    assert chat["usage"]["prompt_tokens"] == completion["usage"]["prompt_tokens"] == 5


async def test_of_too_many_ids_no_text_is_looked_for(tokenizer_dir: Path) -> None:
    servicer = FakeLlmapi(*HELLO)
    alone = Tokenizer.from_file(str(tokenizer_dir / "tokenizer.json")).token_to_id("\u00ff")
    for count, code in ((10, "unsupported_parameter"), (64, "context_length_exceeded")):
        answer = await complete(tokenizer_dir, servicer, prompt=[alone] * count)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"], error["code"]) == (400, "prompt", code)
    assert not servicer.requests


@pytest.mark.parametrize("special", [True, False])
async def test_reasoning_is_told_apart_or_refused(tokenizer_dir: Path, special: bool) -> None:
    tokenizer = Tokenizer.from_file(str(tokenizer_dir / "tokenizer.json"))
    tags = [AddedToken(tag, special=special) for tag in ("[THINK]", "[/THINK]")]
    (tokenizer.add_special_tokens if special else tokenizer.add_tokens)(tags)
    tokenizer.save(str(tokenizer_dir / "tokenizer.json"))
    servicer = FakeLlmapi(build_outputs("[THINK]hm"), build_outputs("[THINK]hm[/THINK]yes", "stop"))
    async with (
        serving(servicer) as endpoint,
        running(tokenizer_dir, endpoint, reasoning_parser="mistral") as (client, _, _),
    ):
        body = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
        response = await client.post("/v1/chat/completions", json=body)
    if special:  # the model would leave the tags out of the text
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "messages"
        assert servicer.requests == []
    else:
        message = response.json()["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == ("hm", "yes")


async def test_choices_are_requests_with_seeds_of_their_own(tokenizer_dir: Path) -> None:
    servicer = FakeLlmapi(*HELLO)
    answer = (await complete(tokenizer_dir, servicer, n=3, seed=5)).json()
    assert [choice["text"] for choice in answer["choices"]] == ["hello, you"] * 3
    seeds = {inputs_of(request)["sampling_param_seed"][2] for request in servicer.requests}
    assert seeds == {struct.pack("<Q", seed) for seed in (5, 6, 7)}
    assert len({request.id for request in servicer.requests}) == 3


async def test_what_has_no_input_is_refused_by_the_clients_name(tokenizer_dir: Path) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}
    cases: list[tuple[dict[str, Any], str]] = [
        ({"logprobs": 1}, "logprobs"),
        ({"echo": True, "logprobs": 1}, "logprobs"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"response_format": schema}, "response_format"),
        ({"structured_outputs": {"regex": "a+"}}, "structured_outputs"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"bad_words": ["x"]}, "bad_words"),
        ({"min_tokens": 2}, "min_tokens"),
        ({"repetition_penalty": 1.2}, "repetition_penalty"),
        ({"use_beam_search": True, "n": 2}, "use_beam_search"),
        ({"ignore_eos": True}, "ignore_eos"),
        ({"stop_token_ids": [3]}, "stop_token_ids"),
        ({"skip_special_tokens": False}, "skip_special_tokens"),
        ({"truncate_prompt_tokens": 4}, "truncate_prompt_tokens"),
        ({"return_token_ids": True}, "return_token_ids"),
        ({"min_p": 0.1}, "min_p"),
    ]
    servicer = FakeLlmapi(*HELLO)
    async with (
        serving(servicer) as endpoint,
        running(tokenizer_dir, endpoint) as (client, _, _),
    ):
        for asked, param in cases:
            body = {"model": "m", "prompt": "x"} | asked
            response = await client.post("/v1/completions", json=body)
            assert response.status_code == 400, (asked, response.text)
            assert response.json()["error"]["param"] == param, asked
        messages = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
        for asked in ({"logprobs": True}, {"response_format": {"type": "json_object"}}):
            response = await client.post("/v1/chat/completions", json=messages | asked)
            assert response.status_code == 400
            assert response.json()["error"]["param"] in asked
    assert servicer.requests == []


async def test_token_ids_are_sent_as_the_text_that_they_are(tokenizer_dir: Path) -> None:
    servicer = FakeLlmapi(*HELLO)
    ids = ids_of(tokenizer_dir, "who?\u00e9")
    answer = (await complete(tokenizer_dir, servicer, prompt=ids)).json()
    assert answer["usage"]["prompt_tokens"] == len(ids)
    assert inputs_of(servicer.requests[0])["text_input"][2] == bytes_tensor.pack(["who?\u00e9"])
    refused = await complete(tokenizer_dir, servicer, prompt=ids[:-1])  # ends in half a character
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "prompt"
    assert len(servicer.requests) == 1

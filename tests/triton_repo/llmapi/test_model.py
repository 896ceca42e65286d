"""The llmapi model in a real tritonserver, with the behaviour of each release."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ops.commands.up import DEMO_ADAPTERS
from tests.support.llmapi_models import ENDLESS, RELEASES, build_inputs, render_releases
from tests.support.triton_server import MODEL, Arrays, Reply, Server, Stream, error_of, serving
from triton_repo.llmapi_repository import render_llmapi

PROMPT = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
ANSWER = "The capital of France is Paris."
CANCELLED = "Request cancelled by client"
METRICS = {
    *("kv_cache_reused_block", "kv_cache_missed_block", "kv_cache_alloc_new_blocks"),
    *("kv_cache_alloc_total_blocks", "kv_cache_hit_rate", "arrival_time_ns"),
    *("first_scheduled_time_ns", "first_token_time_ns", "last_token_time_ns", "acceptance_rate"),
    *("total_accepted_draft_tokens", "total_draft_tokens"),
}


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("llmapi") / "repository"


@pytest.fixture(scope="module")
def triton(repository: Path) -> Iterator[Server]:
    lora = {"max_cpu_loras": 2, "max_lora_rank": 16}
    real = {"model": str(MODEL), "max_num_tokens": 1000, **lora}
    render_llmapi(repository, real, model="real")
    render_llmapi(repository, {"model": str(MODEL), "decoupled": False}, model="whole")
    render_releases(repository, repository.parent / "engine")
    names = [f"--load-model={path.name}" for path in repository.iterdir()]
    with serving(repository.parent, "--model-control-mode=explicit", *names) as server:
        yield server


def streamed(**more: Any) -> Arrays:
    return whole(streaming=True, return_finish_reason=True, **more)


def whole(prompt: str = PROMPT, **more: Any) -> Arrays:
    return build_inputs(prompt, sampling_param_exclude_input_from_output=True, **more)


def text_of(reply: Reply, output: str = "text_output") -> str:
    """Return the output's only element. All outputs are strings, even numbers."""
    assert reply.error is None, reply.error
    assert reply.outputs[output].shape == (1,)
    text: str = reply.outputs[output][0].decode()
    return text


def answer(triton: Server, inputs: Arrays, model: str = "real") -> str:
    (reply,) = triton.ask(inputs, model)
    return text_of(reply)


def lora(key: int, adapter: str, **more: Any) -> dict[str, Any]:
    path = str(DEMO_ADAPTERS / adapter)
    return {"lora_id": key, "lora_name": adapter, "lora_path": path, **more}


def test_a_stream_brings_the_whole_text_so_far(triton: Server) -> None:
    replies = triton.ask(streamed(return_stop_reason=True, return_cumulative_logprob=True), "real")
    texts = [text_of(reply) for reply in replies]
    assert len(texts) > 5
    assert all(later.startswith(earlier) for earlier, later in pairwise(texts))
    assert texts[-1] == ANSWER
    assert replies[-1].final
    assert [text_of(reply, "finish_reason") for reply in replies[-2:]] == ["None", "stop"]
    for output in ("stop_reason", "cumulative_logprob"):
        assert {text_of(reply, output) for reply in replies} == {"None"}


def test_an_answer_that_is_not_streamed_begins_with_the_prompt(triton: Server) -> None:
    (reply,) = triton.ask(build_inputs(PROMPT), "real")
    assert reply.outputs.keys() == {"text_output"}
    assert text_of(reply) == f"user\nWhat is the capital of France?\nassistant\n{ANSWER}"
    assert answer(triton, whole()) == ANSWER


def test_at_most_32_tokens_come_unless_it_is_said(triton: Server) -> None:
    replies = triton.ask(streamed(), "like_main")
    assert text_of(replies[-1]) == " one" * 32
    assert text_of(replies[-1], "finish_reason") == "length"


def test_metrics_are_text_whatever_the_configuration_declares(triton: Server) -> None:
    prompt = "A prompt of its own, and longer than two blocks of tokens. " * 5
    ask = whole(prompt, sampling_param_max_tokens=4, sampling_param_return_perf_metrics=True)
    (first,) = triton.ask(ask, "real")
    (again,) = triton.ask(ask, "real")
    for reply in (first, again):
        assert reply.outputs.keys() == {"text_output"} | METRICS
        times = [int(text_of(reply, name)) for name in sorted(METRICS) if name.endswith("_ns")]
        arrival, scheduled, token, last = times
        assert 0 < arrival <= scheduled < token < last
    assert text_of(first, "kv_cache_hit_rate") == "0.0"
    assert float(text_of(again, "kv_cache_hit_rate")) > 0
    assert int(text_of(again, "kv_cache_reused_block")) == int(
        text_of(first, "kv_cache_missed_block")
    ) - int(text_of(again, "kv_cache_missed_block"))


def test_sampling_is_greedy_unless_something_says_otherwise(triton: Server) -> None:
    hot = {"sampling_param_temperature": 5.0, "sampling_param_max_tokens": 8}
    greedy = answer(triton, whole(sampling_param_max_tokens=8))
    for more in ({"sampling_param_top_k": 1}, {"sampling_param_top_p": 0.0}):
        assert answer(triton, whole(**hot, **more)) == greedy
    drawn = [answer(triton, whole(**hot, sampling_param_seed=seed)) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]


def test_stop_strings_are_matched_as_the_tokens_of_each(triton: Server) -> None:
    words = {"return_finish_reason": True, "return_stop_reason": True}
    stops = np.array([b"unheard", b" capital"], np.object_)
    (reply,) = triton.ask(whole(sampling_param_stop=stops, **words), "real")
    assert text_of(reply) == "The"
    assert text_of(reply, "finish_reason") == "stop"
    assert text_of(reply, "stop_reason") == " capital"
    # A stop string that is a part of a token does not match.
    (reply,) = triton.ask(whole(sampling_param_stop=" capit", **words), "real")
    assert text_of(reply) == ANSWER


def test_an_adapter_is_read_by_path_and_kept_by_id(triton: Server) -> None:
    japanese, chinese = (answer(triton, whole(**lora(i, name))) for i, name in JA_ZH)
    assert len({japanese, chinese, ANSWER}) == 3
    # A known id uses the cached adapter. Its path is not read, but must exist.
    assert answer(triton, whole(**lora(1, "zh"))) == japanese
    # The cache has two adapters. A third id evicts the least recently used one, which is read
    # again.
    assert answer(triton, whole(**lora(3, "ja"))) == japanese
    assert answer(triton, whole(**lora(2, "ja"))) == japanese
    assert answer(triton, whole()) == ANSWER


JA_ZH = ((1, "ja"), (2, "zh"))


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"text": np.array([], np.object_)}, "text_input is missing from the request"),
        ({"text": b"\xff"}, "codec can't decode"),
        ({"sampling_param_top_k": -1}, "top_k: found -1"),
        ({"sampling_param_top_p": 1.5}, "top_p: found 1.5"),
        ({"sampling_param_best_of": 2}, "Greedy decoding"),
        ({"text": "word " * 1100}, "should not exceed max_num_tokens (1000)"),
        ({"lora_id": 1}, "lora_id, lora_name, and lora_path must all be provided together"),
        (lora(9, "none"), "lora_path does not exist on the Triton server's filesystem: "),
        (lora(9, "ja", lora_ckpt_source="other"), "lora_ckpt_source: found other"),
        (lora(9, "."), "adapter_config.json"),
    ],
)
def test_what_is_wrong_is_an_error_of_that_request(
    triton: Server, wrong: dict[str, Any], why: str
) -> None:
    (reply,) = triton.ask(build_inputs(**{"text": PROMPT, **wrong}), "real")
    assert reply.error is not None
    assert "Error generating request: " in reply.error
    assert why in reply.error


def test_a_model_that_is_not_decoupled_answers_whole(triton: Server) -> None:
    status, body = triton.generate("whole", text_input=PROMPT, return_finish_reason=True)
    assert status == 200
    assert body["text_output"].endswith(ANSWER)
    assert body["finish_reason"] == "stop"
    status, body = triton.generate("whole", text_input=PROMPT, streaming=True)
    assert status != 200
    assert body["error"].endswith("Streaming is only supported in decoupled mode.")
    # This model has no lora_config either.
    status, body = triton.generate("whole", text_input=PROMPT, **lora(1, "ja"))
    assert body["error"].endswith("lora_request: the model was loaded without lora_config")


def test_each_release_has_its_inputs(triton: Server) -> None:
    names = {model: {tensor.name for tensor in triton.config(model).input} for model in RELEASES}
    adapters = {"lora_id", "lora_name", "lora_path", "lora_ckpt_source"}
    assert names["like_main"] - names["like_1_3"] == {"image_url"}
    assert names["like_1_3"] - names["like_1_2"] == adapters
    config = triton.config("like_1_2")
    assert config.max_batch_size == 0
    assert config.model_transaction_policy.decoupled


@pytest.mark.parametrize("model", RELEASES)
def test_each_release_ends_a_stream_in_its_way(triton: Server, model: str) -> None:
    replies = triton.ask(streamed(sampling_param_max_tokens=5), model)
    texts = [text_of(reply) for reply in replies if reply.outputs]
    assert texts[-1] == " one" * 5
    assert (len(texts) == 1) == (model == "like_1_2")
    assert replies[-1].final
    assert bool(replies[-1].outputs) == (model != "like_1_3")


@pytest.mark.parametrize("model", RELEASES)
def test_an_early_error_is_answered_but_by_the_1_3_line(triton: Server, model: str) -> None:
    with triton.stream() as stream:
        stream.send(build_inputs(b"\xff"), model, request_id="wrong")
        stream.send(whole(sampling_param_max_tokens=1), model, request_id="right")
        first = stream.next()
        if model == "like_1_3":
            assert text_of(first) == " one"
        else:
            assert "Error generating request: 'utf-8' codec can't" in (first.error or "")


def send_endless(stream: Stream, model: str, *, streaming: bool) -> None:
    """Send a request without an end, which blocks the engine for the next one."""
    more = {"streaming": streaming, "sampling_param_max_tokens": ENDLESS}
    stream.send(whole(**more), model, request_id="endless")
    if streaming and model != "like_1_2":
        assert not stream.next().final


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize("model", RELEASES)
def test_a_stop_request_frees_the_engine(triton: Server, model: str, streaming: bool) -> None:
    with triton.stream() as stream:
        send_endless(stream, model, streaming=streaming)
        stream.send(build_inputs("", stop=True), model, request_id="endless")
        stream.send(whole(sampling_param_max_tokens=1), model, request_id="next")
        replies = [stream.next()]
        while not (replies[-1].request_id == "next" and replies[-1].final):
            replies.append(stream.next())
        assert text_of(replies[-1]) == " one"
        # One error answers the stop request. Releases other than 1.2 also send one to the stopped
        # request.
        errors = [reply.error for reply in replies if reply.error]
        assert errors == [CANCELLED] * (1 if model == "like_1_2" else 2)
        assert not any(reply.final for reply in replies if reply.request_id == "endless")


@pytest.mark.parametrize("model", RELEASES)
def test_a_cancelled_call_frees_the_engine(triton: Server, model: str) -> None:
    with triton.stream() as stream:
        send_endless(stream, model, streaming=True)
    assert answer(triton, whole(sampling_param_max_tokens=1), model) == " one"


def test_a_stop_request_needs_an_id_and_nothing_to_stop(triton: Server) -> None:
    stop = build_inputs("", stop=True)
    assert error_of(triton.ask(stop, "real")) == (
        "A request id must be provided for request cancellation"
    )
    assert error_of(triton.ask(stop, "real", request_id="unheard of")) == CANCELLED


def test_a_model_yaml_that_means_nothing_here_is_refused(tmp_path: Path) -> None:
    """Check that Triton reports each model by name. Triton may crash and is then restarted."""
    wrong = {
        "behaviour": ('behaves_as: "main"', 'behaves_as: "1.4"'),
        "batches": ("  max_batch_size: 0", "  max_batch_size: 4"),
        "speculative": ("backend: pytorch", "speculative_config: {a: 1}"),
    }
    for model, (old, new) in wrong.items():
        render_llmapi(tmp_path / "repository", {"model": str(MODEL)}, model=model)
        path = tmp_path / "repository" / model / "1" / "model.yaml"
        path.write_text(path.read_text().replace(old, new))
    with serving(tmp_path, "--exit-on-error=false", "--strict-readiness=false") as server:
        whys = server.why_unavailable()
    assert whys.keys() == wrong.keys()
    assert "triton_config.behaves_as: found 1.4" in whys["behaviour"]
    assert "triton_config.max_batch_size: found 4" in whys["batches"]
    assert "speculative_config: not supported" in whys["speculative"]

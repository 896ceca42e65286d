"""Gateways that adapt to each model of one Triton with repositories of many releases."""

from __future__ import annotations

import asyncio
import contextlib
import re
import shutil
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.in_process import metric_of, running
from tests.support.triton_server import (
    LONG_SEQ_LEN,
    MODEL,
    Server,
    long_model,
    repository_parameters,
    serving,
)
from triton_repo.cpu_executor import engine
from triton_repo.parameters import Value
from triton_repo.releases import RELEASES, V0_17, V0_19, V0_20
from triton_repo.render import render

pytestmark = pytest.mark.slow

CAPITAL = [{"role": "user", "content": "What is the capital of France?"}]
COUNT = [{"role": "user", "content": "Count from 1 to 30"}]
DRAW = {"prompt": "I am", "temperature": 1, "seed": 11, "max_tokens": 20}
GUIDES = ("guided_decoding_guide_type", "guided_decoding_guide")
SINCE_V0_14 = ("exclude_input_in_output", "num_return_sequences", "return_kv_cache_reuse_stats")
SINCE_V0_8 = (
    *("frequency_penalty", "lora_task_id", "lora_weights", "lora_config"),
    *("return_context_logits", "return_generation_logits"),
)
BLS_ON_MAIN = {
    'tensorrt_llm_model_name" value { string_value: "': (
        'tensorrt_llm_model_name" value { string_value: "main'
    )
}
UNSIGNED = ("request_output_len", "end_id", "pad_id")


@dataclass(frozen=True)
class Model:
    """A model of this project, changed to look like that of another release or deployment.

    `release` names the set of templates that the model is rendered from.
    """

    source: str = "tensorrt_llm"
    release: str = V0_17
    drop: tuple[str, ...] = ()
    rename: Mapping[str, str] = field(default_factory=dict)
    unsigned: tuple[str, ...] = ()
    decoupled: bool = True

    def write(self, rendered: Path, repository: Path, name: str) -> None:
        """Write the model to `repository`.

        `rendered` contains the rendered repository of each release.
        """
        folder = repository / name
        shutil.copytree(rendered / self.release / self.source, folder)
        text = (folder / "config.pbtxt").read_text(encoding="utf-8")
        text = text.replace(f'name: "{self.source}"', f'name: "{name}"', 1)
        for dropped in self.drop:
            text = re.sub(rf'.*name: "{dropped}".*\n', "", text)
            # In an ensemble, drop the mapping to the step that no longer has the input.
            text = re.sub(rf'.*input_map .*value: "{dropped}".*\n', "", text)
        text = re.sub(r",(\n(  #.*\n|\n)*\])", r"\1", text)
        for old, new in self.rename.items():
            text = text.replace(f'"{old}"', f'"{new}"')
        for unsigned in self.unsigned:
            signed = f'"{unsigned}" data_type: TYPE_INT32'
            assert signed in text
            text = text.replace(signed, signed.replace("INT32", "UINT32"))
        if not self.decoupled:
            text = text.replace("decoupled: true", "decoupled: false")
        (folder / "config.pbtxt").write_text(text, encoding="utf-8")


CORES = {
    "v0_6": Model(drop=(*GUIDES, *SINCE_V0_14, *SINCE_V0_8), unsigned=UNSIGNED),
    "v0_9": Model(drop=(*GUIDES, *SINCE_V0_14)),
    "v0_17": Model(drop=GUIDES),
    "v0_19": Model(release=V0_19),
    "main": Model(release=V0_20),
}
UNARY = {
    "unary_v0_9": Model(drop=(*GUIDES, *SINCE_V0_14), decoupled=False),
    "unary": Model(decoupled=False),
}
TEXT = {
    "ensemble_v0_9": Model(
        "ensemble", drop=(*GUIDES, *SINCE_V0_14), rename={"tensorrt_llm": "v0_9"}
    ),
    "ensemble_main": Model("ensemble", V0_20, rename={"tensorrt_llm": "main"}),
    "bls_main": Model("tensorrt_llm_bls", V0_20, rename=BLS_ON_MAIN),
    "ensemble_unary": Model("ensemble", rename={"tensorrt_llm": "unary"}),
    "ensemble_unary_v0_9": Model(
        "ensemble", drop=(*GUIDES, *SINCE_V0_14), rename={"tensorrt_llm": "unary_v0_9"}
    ),
}
# By model, the parameters for which the model has no tensor.
REFUSED = {
    "v0_6": {"frequency_penalty", "structured_outputs"},
    "v0_9": {"structured_outputs"},
    "v0_17": {"structured_outputs"},
    "unary_v0_9": {"structured_outputs"},
    "ensemble_v0_9": {"structured_outputs", "logprobs"},
    "ensemble_unary_v0_9": {"structured_outputs", "logprobs"},
}
LLMAPI = """
name: "llmapi"
backend: "python"
max_batch_size: 0
input [
  { name: "text_input" data_type: TYPE_STRING dims: [ -1 ] },
  { name: "sampling_param_max_tokens" data_type: TYPE_INT32 dims: [ 1 ] optional: true }
]
output [ { name: "text_output" data_type: TYPE_STRING dims: [ -1 ] } ]
parameters { key: "tokenizer_dir" value { string_value: "%s" } }
"""


@pytest.fixture(scope="module")
def triton(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("adapting")
    engine.build(
        long_model(folder),
        folder / "engine",
        max_beam_width=2,
        gather_generation_logits=True,
        lora_target_modules=engine.LLAMA_LORA_MODULES,
    )
    repository = folder / "repository"
    parameters: dict[str, Value] = {"max_beam_width": 2, "enable_kv_cache_reuse": True}
    parameters["max_tokens_in_paged_kv_cache"] = 2 * LONG_SEQ_LEN
    parameters["guided_decoding_backend"] = "xgrammar"
    for release in RELEASES:
        values = repository_parameters(folder, **parameters)
        render(folder / "rendered" / release, values, release=release)
    shutil.copytree(folder / "rendered" / V0_17, repository)
    for name, model in (CORES | UNARY | TEXT).items():
        model.write(folder / "rendered", repository, name)
    shutil.copytree(repository / "postprocessing", repository / "llmapi")
    (repository / "llmapi" / "config.pbtxt").write_text(LLMAPI % MODEL, encoding="utf-8")
    with serving(folder) as server:
        yield server


class GatewayApplication:
    """A gateway that is configured for one model, with its `service` object."""

    def __init__(self, client: httpx.AsyncClient, service: Any) -> None:
        self._client = client
        self.service = service

    async def post(self, path: str, **body: Any) -> httpx.Response:
        return await self._client.post(path, json={"model": "m"} | body)

    async def complete(self, **body: Any) -> dict[str, Any]:
        return await self._answer("/v1/completions", body)

    async def chat(self, **body: Any) -> dict[str, Any]:
        body = {"messages": CAPITAL, "temperature": 0} | body
        return await self._answer("/v1/chat/completions", body)

    async def _answer(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        response = await self.post(path, **body)
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    async def refused(self, **body: Any) -> str | None:
        """Return the parameter that a completion is refused for, or None if it is served."""
        response = await self.post("/v1/completions", **{"prompt": "Hi", "max_tokens": 4} | body)
        assert response.status_code in (200, 400), response.text
        param: str | None = response.json()["error"]["param"] if response.is_error else None
        return param

    async def health(self) -> tuple[int, dict[str, Any]]:
        response = await self._client.get("/health/ready")
        return response.status_code, response.json()


@contextlib.asynccontextmanager
async def gateway(
    triton: Server, folder: Path, **settings: Any
) -> AsyncIterator[GatewayApplication]:
    fields: dict[str, Any] = {"tokenizer_dir": MODEL, "max_seq_len": None} | settings
    async with running(folder, triton.grpc, **fields) as (client, service, _):
        yield GatewayApplication(client, service)


def settings_of(name: str) -> dict[str, Any]:
    """Return the settings that select the model."""
    if name in TEXT:
        return {"triton_mode": "text", "triton_text_model": name}
    return {"triton_model": name}


@pytest.mark.parametrize("name", [*CORES, *UNARY, *TEXT])
async def test_the_same_requests_through_every_release(
    triton: Server, tmp_path: Path, name: str
) -> None:
    async with gateway(triton, tmp_path, triton_model="tensorrt_llm") as reference:
        expected = await reference.complete(**DRAW)
        answered = await reference.chat()
    async with gateway(triton, tmp_path, **settings_of(name)) as found:
        assert (await found.complete(**DRAW))["choices"] == expected["choices"]
        answer = await found.chat()
        assert "Paris" in answer["choices"][0]["message"]["content"]
        assert answer["choices"] == answered["choices"]
        assert answer["usage"]["prompt_tokens"] == answered["usage"]["prompt_tokens"]
        assert answer["usage"]["completion_tokens"] == answered["usage"]["completion_tokens"]
        held = await found.chat(min_tokens=30, max_tokens=60)
        # In text mode the end token does not show in the text, so fewer tokens are counted.
        assert held["usage"]["completion_tokens"] >= (30 if name not in TEXT else 20)
        [stopped] = (await found.chat(messages=COUNT, stop=" 6"))["choices"]
        assert stopped["message"]["content"] == "1, 2, 3, 4, 5,"
        assert stopped["finish_reason"] == "stop"
        short = await found.chat(messages=COUNT, max_tokens=4, n=2)
        assert [c["message"]["content"] for c in short["choices"]] == ["1, 2, "] * 2
        assert [c["finish_reason"] for c in short["choices"]] == ["length"] * 2
        assert short["usage"]["completion_tokens"] == 8
        asked = {
            "frequency_penalty": 1.0,
            "structured_outputs": {"choice": ["yes", "no"]},
            "logprobs": 0,
            "logit_bias": {str(found.service.prompts.tokenizer.token_to_id("z")): 1},
            "bad_words": ["x"],
        }
        refused = {param for param in asked if await found.refused(**{param: asked[param]})}
        assert refused == REFUSED.get(name, {"logprobs"} if name in TEXT else set())


@pytest.mark.parametrize("name", ["tensorrt_llm", "v0_6", "main", "ensemble_main", "bls_main"])
async def test_cached_tokens_where_the_model_counts_them(
    triton: Server, tmp_path: Path, name: str
) -> None:
    prompt = f"{name}: " + " ".join(f"word{n}" for n in range(60))
    async with gateway(triton, tmp_path, **settings_of(name)) as found:
        for _ in range(2):
            answer = await found.complete(prompt=prompt, max_tokens=2)
    cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert (cached >= 64) is (name != "v0_6")


@pytest.mark.parametrize("name", [*UNARY, "ensemble_unary", "ensemble_unary_v0_9"])
async def test_without_decoupled_mode_nothing_streams(
    triton: Server, tmp_path: Path, name: str
) -> None:
    async with gateway(triton, tmp_path, **settings_of(name)) as found:
        assert await found.refused(stream=True) == "stream"
        assert await found.refused(stream=False) is None
        response = await found.post("/v1/chat/completions", messages=CAPITAL, stream=True)
        assert (response.status_code, response.json()["error"]["param"]) == (400, "stream")


@pytest.mark.parametrize("name", [*UNARY, "ensemble_unary", "ensemble_unary_v0_9", "v0_9"])
async def test_beams_without_the_prompt(triton: Server, tmp_path: Path, name: str) -> None:
    body = {"prompt": "The capital of", "n": 2, "max_tokens": 6, "use_beam_search": True}
    async with gateway(triton, tmp_path, triton_model="tensorrt_llm") as reference:
        expected = await reference.complete(**body)
    async with gateway(triton, tmp_path, **settings_of(name)) as found:
        answer = await found.complete(**body)
    assert [c["text"] for c in answer["choices"]] == [c["text"] for c in expected["choices"]]


@pytest.mark.parametrize("name", UNARY)
async def test_log_probabilities_without_decoupled_mode(
    triton: Server, tmp_path: Path, name: str
) -> None:
    body = {"prompt": "The capital of France is", "max_tokens": 4, "temperature": 0, "logprobs": 2}
    async with gateway(triton, tmp_path, triton_model="tensorrt_llm") as reference:
        expected = await reference.complete(**body)
    async with gateway(triton, tmp_path, **settings_of(name)) as found:
        answer = await found.complete(**body)
    logprobs, wanted = (a["choices"][0]["logprobs"] for a in (answer, expected))
    assert logprobs["tokens"] == wanted["tokens"]
    assert logprobs["token_logprobs"] == pytest.approx(wanted["token_logprobs"], abs=1e-3)
    assert [set(top) for top in logprobs["top_logprobs"]] == [
        set(top) for top in wanted["top_logprobs"]
    ]


@pytest.mark.parametrize(("name", "core"), [("unary", "unary"), ("ensemble_main", "main")])
async def test_a_client_that_leaves_stops_the_engine(
    triton: Server, tmp_path: Path, name: str, core: str
) -> None:
    labels = {"model": core, "request_type": "active"}

    async def active(count: int) -> None:
        family = "nv_trt_llm_request_metrics"
        await asyncio.to_thread(triton.wait_metric, count, family, **labels)

    async with gateway(triton, tmp_path, **settings_of(name)) as found:
        body = {"prompt": "1, 2, 3,", "max_tokens": 30_000, "ignore_eos": True}
        request = asyncio.create_task(found.complete(**body))
        await active(1)
        request.cancel()
        await active(0)
        assert metric_of(found.service, "gateway_stops_total", reason="disconnect") == 1


@pytest.mark.parametrize(
    ("settings", "mode", "model", "why"),
    [
        ({}, "token", "tensorrt_llm", "the core model takes token ids"),
        ({"triton_mode": "token", "triton_model": "main"}, "token", "main", "GATEWAY_TRITON_MODE"),
        ({"triton_mode": "text"}, "text", "ensemble", "GATEWAY_TRITON_MODE"),
        ({"triton_model": "nothing"}, "text", "ensemble", "does not serve 'nothing'"),
        ({"triton_model": "llmapi"}, "text", "ensemble", "llmapi repository"),
        (settings_of("bls_main"), "text", "bls_main", "GATEWAY_TRITON_MODE"),
    ],
)
async def test_what_is_chosen_and_why(
    triton: Server, tmp_path: Path, settings: dict[str, Any], mode: str, model: str, why: str
) -> None:
    async with gateway(triton, tmp_path, **settings) as found:
        status, health = await found.health()
    assert status == 200
    assert (health["engine"]["mode"], health["engine"]["model"]) == (mode, model)
    assert why in health["engine"]["why"]


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"triton_mode": "token", "triton_model": "nothing"}, "does not serve 'nothing'"),
        ({"triton_mode": "token", "triton_model": "llmapi"}, "llmapi repository"),
        ({"triton_mode": "token", "triton_model": "postprocessing"}, "has no input input_ids"),
        ({"triton_mode": "text", "triton_text_model": "llmapi"}, "llmapi repository"),
        ({"triton_mode": "text", "triton_text_model": "main"}, "has no input text_input"),
    ],
)
async def test_what_cannot_be_driven_is_not_ready_and_says_why(
    triton: Server, tmp_path: Path, settings: dict[str, Any], why: str
) -> None:
    async with gateway(triton, tmp_path, ready=False, **settings) as found:
        status, health = await found.health()
        refused = await found.post("/v1/completions", prompt="Hi")
    assert status == 503
    assert why in health["triton"]
    assert refused.status_code == 503


async def test_what_text_mode_refuses(triton: Server, tmp_path: Path) -> None:
    cases: list[tuple[dict[str, Any], str | None]] = [
        ({"prompt": [42, 75]}, "prompt"),  # `Hi` as text encodes to one token, not these two
        ({"logprobs": 1}, "logprobs"),
        ({"best_of": 2}, "best_of"),
        ({"stop_token_ids": [5]}, "stop_token_ids"),
        ({"return_token_ids": True}, "return_token_ids"),
        ({"truncate_prompt_tokens": 1}, "truncate_prompt_tokens"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"skip_special_tokens": False}, "skip_special_tokens"),
        ({"echo": True}, None),
        ({"min_tokens": 1}, None),
        ({"skip_special_tokens": True}, None),
    ]
    async with gateway(triton, tmp_path, triton_mode="text") as found:
        for body, param in cases:
            assert await found.refused(**body) == param, body


@pytest.mark.parametrize("name", ["ensemble_main", "bls_main"])
async def test_a_biased_token_that_is_a_word(triton: Server, tmp_path: Path, name: str) -> None:
    async with gateway(triton, tmp_path, **settings_of(name)) as found:
        z = found.service.prompts.tokenizer.token_to_id("z")
        answer = await found.complete(
            prompt="Hi", temperature=0, max_tokens=3, logit_bias={str(z): 100}
        )
        assert answer["choices"][0]["text"] == "zzz"
        # A token that is half a character cannot be sent as a word.
        half = found.service.prompts.tokenizer.encode("猫猬").ids[-1]
        assert await found.refused(logit_bias={str(half): 1}) == "logit_bias"

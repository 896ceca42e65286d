"""llmapi engines that fail, are silent, or are dead although Triton reports the model as ready."""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.event_clock import EventClock
from tests.support.fake_llmapi import FakeLlmapi, build_outputs, inputs_of
from tests.support.fake_triton import serving
from tests.support.in_process import metric_of, running, save_tokenizer

OK = (build_outputs("hello", "stop"),)
DEAD = "Error generating request: the worker processes have ended"
_WITHIN_S = 300.0


@pytest.fixture
def tokenizer_dir(tmp_path: Path) -> Path:
    save_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "!"}')
    return tmp_path


async def until(met: Callable[[], object]) -> None:
    async with asyncio.timeout(_WITHIN_S):
        while not met():
            await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def gateway(
    tokenizer_dir: Path, *servicers: FakeLlmapi, **settings: Any
) -> AsyncIterator[tuple[Any, Any]]:
    """Start a gateway. Yield a function that requests a completion, and the service."""
    async with contextlib.AsyncExitStack() as stack:
        endpoints = [await stack.enter_async_context(serving(each)) for each in servicers]
        client, service, _ = await stack.enter_async_context(
            running(tokenizer_dir, ",".join(endpoints), **settings)
        )

        async def ask(prompt: str = "x", **body: Any) -> Any:
            body = {"model": "m", "prompt": prompt} | body
            return await client.post("/v1/completions", json=body)

        yield ask, service


def proofs(servicer: FakeLlmapi) -> int:
    """Return the number of probes, which are the gateway's own requests for one token."""
    limits = [inputs_of(each)["sampling_param_max_tokens"][2] for each in servicer.requests]
    return limits.count(struct.pack("<i", 1))


async def test_a_dead_engine_is_out_until_it_makes_a_token(tokenizer_dir: Path) -> None:
    servicer = FakeLlmapi(DEAD)
    async with gateway(tokenizer_dir, servicer) as (ask, service):
        assert (await ask()).status_code == 500
        await until(lambda: not service.replicas.ready)
        assert "makes no tokens" in service.replicas.why_not_ready
        assert (await ask()).status_code == 503
        before = proofs(servicer)
        assert before >= 1
        await until(lambda: proofs(servicer) > before)  # the probe is repeated
        assert not service.replicas.ready
        servicer.steps = [{}]
        before = proofs(servicer)
        await until(lambda: proofs(servicer) > before + 1)
        assert not service.replicas.ready  # a request that ends without a token does not count
        servicer.steps = list(OK)
        await until(lambda: service.replicas.ready)
        assert (await ask()).json()["choices"][0]["text"] == "hello"


async def test_a_request_that_fails_by_itself_takes_no_engine_from_others(
    tokenizer_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    servicer = FakeLlmapi(*OK)
    servicer.of_prompt["poison"] = (DEAD,)
    async with gateway(tokenizer_dir, servicer) as (ask, service):
        for asked in range(1, 6):
            assert (await ask("poison")).status_code == 500
            await until(lambda asked=asked: proofs(servicer) >= asked)
            assert (await ask()).status_code == 200
        [replica] = service.replicas
        assert replica.state == "ready"
    assert "engine not ready" not in caplog.text


@pytest.mark.parametrize(
    ("text", "param", "code"),
    [
        ("the sum of prompt length 9 should not exceed max_num_tokens (8)", None, "context_length"),
        ("prompt length 5 is larger than max_seq_len 4", None, "context_length"),
        ("Streaming is only supported in decoupled mode.", "stream", "unsupported"),
        ("lora_id, lora_name, and lora_path must all be provided together", "model", "None"),
        ("Unsupported image_url 'x'", "messages", "None"),
    ],
)
async def test_a_clients_mistake_is_told_as_one_and_doubts_nobody(
    tokenizer_dir: Path, text: str, param: str | None, code: str
) -> None:
    servicer = FakeLlmapi(f"Error generating request: {text}")
    async with gateway(tokenizer_dir, servicer) as (ask, service):
        for _ in range(4):
            answer = await ask()
            assert answer.status_code == 400, answer.text
            error = answer.json()["error"]
            assert error["param"] == param
            assert str(error["code"]).startswith(code)
        [replica] = service.replicas
        # Wait, because on a busy machine a late poll may make the engine suspect for a moment.
        await until(lambda: not replica.engine.suspect)
        assert replica.state == "ready"
    assert proofs(servicer) == 0


async def test_a_request_that_is_not_begun_goes_to_another(tokenizer_dir: Path) -> None:
    clock = EventClock()
    silent, other = FakeLlmapi(None), FakeLlmapi(*OK)
    silent.of_prompt["Hello"] = OK  # answers the gateway's probe: the engine itself works
    async with gateway(tokenizer_dir, silent, other, first_response_timeout=30) as (ask, service):
        while not silent.requests:
            answer = await clock.leap_once(lambda: bool(silent.requests), ask(stream=True), 40)
            assert '"text":"hello"' in answer.text
        await until(lambda: silent.stopped)
        [lost] = [each.id for each in silent.requests if each.id in silent.stopped]
        # the stream is also reset, in case the stop has no effect
        await until(lambda: lost in silent.cancelled)
        await until(lambda: proofs(silent))
        await until(lambda: all(replica.state == "ready" for replica in service.replicas))
        assert metric_of(service, "gateway_stops_total", reason="timeout") == 1


async def test_what_answers_once_has_no_time_for_a_first_response(tokenizer_dir: Path) -> None:
    clock = EventClock()
    servicer = FakeLlmapi(None, streams=False)
    limits = {"first_response_timeout": 10, "request_timeout": 30}
    async with gateway(tokenizer_dir, servicer, **limits) as (ask, _):
        asked = asyncio.create_task(ask())
        await until(lambda: servicer.requests)
        clock.leap(20)
        answer = await clock.leap_once(lambda: True, asked, 20)
        await until(lambda: servicer.stopped)
        assert (answer.status_code, answer.json()["error"]["code"]) == (504, "timeout")
    assert servicer.stopped == [servicer.requests[0].id]


async def test_what_answers_once_has_no_time_to_its_first_token(tokenizer_dir: Path) -> None:
    async with gateway(tokenizer_dir, FakeLlmapi(*OK, streams=False)) as (ask, service):
        assert '"text":"hello"' in (await ask(stream=True)).text
        for kind in ("count", "sum"):
            name = f"gateway_time_to_first_token_seconds_{kind}"
            assert not metric_of(service, name, model="m")


async def test_what_comes_whole_and_too_late_makes_the_engine_show_a_token(
    tokenizer_dir: Path,
) -> None:
    """A missed deadline leads to a probe, which shows that the engine works.

    Without the probe, a client's short deadline would take the engine out of use for all.
    """
    clock = EventClock()
    servicer = FakeLlmapi(None)
    servicer.of_prompt["Hello"] = OK
    limits = {"first_response_timeout": 10, "request_timeout": 20}
    async with gateway(tokenizer_dir, servicer, **limits) as (ask, service):
        [replica] = service.replicas
        for asked in range(1, 7):
            answer = await clock.leap_once(
                lambda asked=asked: len(servicer.requests) - proofs(servicer) >= asked, ask(), 20
            )
            assert (answer.status_code, answer.json()["error"]["code"]) == (504, "timeout")
            await until(lambda asked=asked: proofs(servicer) >= asked)
            await until(lambda: not replica.engine.suspect)
            assert replica.state == "ready"


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("streams", [True, False])
async def test_silence_tells_of_death_where_tokens_come_as_they_are_made(
    tokenizer_dir: Path, monkeypatch: pytest.MonkeyPatch, streams: bool, stream: bool
) -> None:
    """Unanswered probes show that an engine is dead if the engine streams.

    An engine that sends only complete responses is also silent while it is busy.
    """
    monkeypatch.setattr("gateway.triton.llmapi.token_probe._PROBE_TIMEOUT_S", 0.3)
    servicer = FakeLlmapi(None, streams=streams)
    servicer.of_prompt["poison"] = (DEAD,)
    async with gateway(tokenizer_dir, servicer) as (ask, service):
        [replica] = service.replicas
        waiting = asyncio.create_task(ask("long", stream=stream))
        await until(lambda: servicer.requests)
        assert (await ask("poison")).status_code == 500
        if streams:
            assert (await waiting).status_code == 503
            assert "makes no tokens" in replica.engine.why_not_ready
            assert proofs(servicer) >= (1 if stream else 3)
        else:
            await until(lambda: proofs(servicer) >= 5)
            assert replica.engine.ready
            assert replica.engine.suspect
            waiting.cancel()


async def test_a_whole_answer_hides_no_engine_whose_streams_have_stopped(
    tokenizer_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.triton.llmapi.token_probe._PROBE_TIMEOUT_S", 0.3)
    monkeypatch.setattr("gateway.triton.engine._MAX_SILENT_PROBES", 1_000_000)
    servicer = FakeLlmapi(None)
    servicer.of_prompt |= {"poison": (DEAD,), "flows": (build_outputs("he"), None)}
    async with gateway(tokenizer_dir, servicer) as (ask, service):
        [replica] = service.replicas
        streamed = asyncio.create_task(ask("flows", stream=True))
        first = "gateway_time_to_first_token_seconds_count"
        await until(lambda: metric_of(service, first, model="m"))
        whole = asyncio.create_task(ask("long"))
        await until(lambda: len(servicer.requests) == 2)
        assert (await ask("poison")).status_code == 500
        await until(lambda: not replica.engine.ready)
        assert "makes no tokens" in replica.engine.why_not_ready
        assert (await whole).status_code == 503
        assert '"code":"engine_unavailable"' in (await streamed).text


async def test_a_token_is_a_proof_whatever_fails_behind_it(
    tokenizer_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An answered request counts as proof, so an unanswered probe does not make the engine dead.

    A full engine delays the probe, and any tenant can send a request that fails.
    """
    monkeypatch.setattr("gateway.triton.llmapi.token_probe._PROBE_TIMEOUT_S", 3.0)
    servicer = FakeLlmapi(*OK)
    servicer.of_prompt |= {"poison": (DEAD,), "Hello": (None,)}
    async with gateway(tokenizer_dir, servicer) as (ask, service):
        assert (await ask("poison")).status_code == 500
        await until(lambda: proofs(servicer))
        assert (await ask()).status_code == 200
        assert (await ask("poison")).status_code == 500
        await until(lambda: proofs(servicer) == 2)
        assert service.replicas.ready
    assert "engine not ready" not in caplog.text


FULL = "Exceeds maximum queue size"


async def test_an_engine_whose_queue_is_full_is_not_dead_for_that(
    tokenizer_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A full queue is no sign of a dead engine, and no sign that a dead engine has recovered."""
    servicer = FakeLlmapi(*OK)
    servicer.of_prompt |= {"poison": (DEAD,), "Hello": (FULL,)}
    async with gateway(tokenizer_dir, servicer) as (ask, service):
        assert (await ask("poison")).status_code == 500
        await until(lambda: proofs(servicer) >= 2)
        assert service.replicas.ready
        assert (await ask()).status_code == 200
        assert "engine not ready" not in caplog.text
        servicer.of_prompt["Hello"] = (DEAD,)
        assert (await ask("poison")).status_code == 500
        await until(lambda: not service.replicas.ready)
        servicer.of_prompt["Hello"] = (FULL,)
        before = proofs(servicer)
        await until(lambda: proofs(servicer) > before + 1)
        assert not service.replicas.ready
        del servicer.of_prompt["Hello"]
        await until(lambda: service.replicas.ready)


@pytest.mark.parametrize("reason", ["cancelled", "timeout"])
async def test_an_engine_that_gives_up_is_no_end_of_an_answer(
    tokenizer_dir: Path, reason: str
) -> None:
    servicer = FakeLlmapi(build_outputs("he"), build_outputs("hell", reason))
    async with gateway(tokenizer_dir, servicer) as (ask, _):
        assert (await ask()).status_code == 503
        streamed = (await ask(stream=True)).text
        assert '"code":"engine_unavailable"' in streamed
        assert '"finish_reason":"' not in streamed

"""The life of a request in the executor: queueing, refusal, cancellation, statistics, shutdown."""

from __future__ import annotations

import re
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest

from tests.support.executor_client import (
    gather,
    golden_greedy,
    golden_prompt,
    request,
    run,
    start_golden,
    stats_until_idle,
)
from triton_repo.cpu_executor import bindings as trtllm
from triton_repo.cpu_executor.bindings import FinishReason
from triton_repo.cpu_executor.llama import Llama

PROMPT = golden_prompt()
GREEDY = golden_greedy()
STEP_MS = 100


def test_cancelled_requests_end_normally_without_ids(tmp_path: Path) -> None:
    asked = [request(PROMPT, 350), request(PROMPT, 350, streaming=False)]
    with start_golden(tmp_path, least_iteration_ms=STEP_MS) as executor:
        ids = executor.enqueue_requests(asked)
        assert executor.await_responses(ids[0], timeout=60.0)
        for _ in range(3):
            for i in ids:
                executor.cancel_request(i)
        streamed, whole = gather(executor, ids)
        executor.cancel_request(ids[0])
        executor.cancel_request(10**9)
        assert run(executor, request(PROMPT, 2))[0].tokens() == GREEDY[:2]
    assert streamed.last.output_token_ids == [[]]
    assert whole.last.output_token_ids == [PROMPT]
    for output in (streamed, whole):
        assert output.error is None
        assert output.last.is_final
        assert output.last.finish_reasons == [FinishReason.CANCELLED]


def test_cancelled_samples_each_get_a_response(executor: trtllm.Executor) -> None:
    (first,) = executor.enqueue_requests([request(PROMPT, 350, num_return_sequences=3, top_p=1.0)])
    executor.cancel_request(first)
    (output,) = gather(executor, [first])
    ends = [r for r in output.results if r.is_sequence_final]
    assert sorted(r.sequence_index for r in ends) == [0, 1, 2]
    assert [r.is_final for r in ends] == [False, False, True]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"prompt": [5] * 600},
            r"^Encountered an error when fetching new request: .*Prompt length \(600\) exceeds "
            r"maximum input length \(511\)\. Set log level to info",
        ),
        ({"end_id": 160}, r"EndId \(160\) is not within acceptable range \[-1, 160\)\."),
        ({"beam_width": 9}, "beam width 9 is larger"),
        ({"top_p_min": 0.0}, "Incorrect sampling config"),
        ({"no_repeat_ngram_size": 0}, "Incorrect sampling config"),
        ({"embedding_bias": [0.0] * 7}, "Expected last dimension to be same as vocab size: 160"),
        ({"num_return_sequences": 17}, r"\(17\) exceeds the maximum batch size \(16\)"),
        (
            {
                "guided_decoding_params": trtllm.GuidedDecodingParams(
                    trtllm.GuidedDecodingParams.GuideType.JSON
                )
            },
            "GuidedDecoder is not setup",
        ),
        ({"position_ids": [0]}, "position_ids is not supported by the CPU executor"),
        ({"type": trtllm.RequestType.REQUEST_TYPE_CONTEXT_ONLY}, "CONTEXT_ONLY is not supported"),
    ],
)
def test_refused_at_fetch(executor: trtllm.Executor, changes: dict, text: str) -> None:
    asked = request(**{"prompt": PROMPT, "max_tokens": 4, **changes})
    (output,) = run(executor, asked)
    assert output.error is not None
    assert re.search(text, output.error), output.error


def test_logits_need_the_engine_flags(tmp_path: Path) -> None:
    limits = {"gather_context_logits": False, "gather_generation_logits": False}
    with start_golden(tmp_path, limits=limits) as executor:
        context, generation = run(
            executor,
            request(PROMPT, 2, return_context_logits=True),
            request(PROMPT, 2, return_generation_logits=True),
        )
    assert "need to build engine with gather_context_logits" in str(context.error)
    assert "gather_generation_logits must be enabled" in str(generation.error)


def test_queue_limit_counts_samples_and_refuses_all_or_nothing(tmp_path: Path) -> None:
    settings = {"max_queue_size": 3, "max_batch_size": 1, "least_iteration_ms": STEP_MS}
    with start_golden(tmp_path, **settings) as executor:
        (running,) = executor.enqueue_requests([request(PROMPT, 300)])
        assert executor.await_responses(running, timeout=60.0)
        queued = executor.enqueue_requests([request(PROMPT, 2)])
        pair = request(PROMPT, 2, num_return_sequences=2)
        with pytest.raises(RuntimeError, match="Maximum queue size of 3 has been reached, please"):
            executor.enqueue_requests([pair, request(PROMPT, 2)])
        queued += executor.enqueue_requests([request(PROMPT, 2)])
        assert executor.enqueue_requests([]) == []
        executor.cancel_request(running)
        outputs = gather(executor, [running, *queued])
        assert [o.tokens() for o in outputs[1:]] == [GREEDY[:2]] * 2


def test_priority_goes_first(tmp_path: Path) -> None:
    with start_golden(tmp_path, max_batch_size=1, least_iteration_ms=STEP_MS) as executor:
        (running,) = executor.enqueue_requests([request(PROMPT, 300)])
        assert executor.await_responses(running, timeout=60.0)
        ids = executor.enqueue_requests([request(PROMPT, 2, priority=p) for p in (0.2, 0.5, 0.9)])
        executor.cancel_request(running)
        order = list[int]()
        while len(order) < 4:
            responses = executor.await_responses(timeout=60.0)
            assert responses
            order += [each.request_id for each in responses if each.result.is_final]
        assert order == [running, *reversed(ids)]


def test_waiting_for_ids(executor: trtllm.Executor) -> None:
    ids = executor.enqueue_requests([request(PROMPT, 2, streaming=False) for _ in range(2)])
    pair = executor.await_responses(ids, timedelta(seconds=60))
    assert [[r.request_id for r in part] for part in pair] == [[ids[0]], [ids[1]]]
    (again,) = executor.await_responses(ids[0])
    assert f"ReqId {ids[0]} has already been processed" in again.error_msg
    assert executor.await_responses(10**9, 0.01) == []
    assert executor.await_responses(timedelta(milliseconds=1)) == []
    assert executor.get_num_responses_ready() == 0
    with pytest.raises(TypeError):
        executor.await_responses(timeout=1)


def test_client_id_comes_back(executor: trtllm.Executor) -> None:
    executor.enqueue_request(request(PROMPT, 1, client_id=42))
    (response,) = executor.await_responses(timeout=60.0)
    assert response.client_id == 42


def test_statistics_end_with_an_idle_record(tmp_path: Path) -> None:
    with start_golden(tmp_path, max_batch_size=8) as executor:
        run(executor, *[request(PROMPT[: 20 + i], 6) for i in range(3)])
        stats = stats_until_idle(executor)
        assert executor.get_latest_iteration_stats() == []
    first, *_, last_step, idle = stats
    assert first.num_new_active_requests >= 1
    assert first.inflight_batching_stats.num_ctx_tokens > 0
    assert sum(s.inflight_batching_stats.num_ctx_tokens for s in stats) == 20 + 21 + 22
    assert sum(s.num_completed_requests for s in stats) == 3
    assert last_step.num_active_requests > 0
    assert max(s.kv_cache_stats.used_num_blocks for s in stats) >= 6
    assert (idle.num_active_requests, idle.inflight_batching_stats.num_scheduled_requests) == (0, 0)
    assert idle.kv_cache_stats.used_num_blocks == 0
    assert idle.kv_cache_stats.free_num_blocks == idle.kv_cache_stats.max_num_blocks
    assert idle.max_num_active_requests == 8
    assert idle.kv_cache_stats.tokens_per_block == 16
    time.strptime(idle.timestamp, "%m-%d-%Y %H:%M:%S.%f")
    assert '"iter"' in idle.to_json_str()
    assert not hasattr(idle, "num_scheduled_requests")


def test_statistics_are_limited(tmp_path: Path) -> None:
    with start_golden(tmp_path, iter_stats_max_iterations=5) as executor:
        run(executor, request(PROMPT, 20))
        assert len(executor.get_latest_iteration_stats()) == 5


def test_perf_metrics(executor: trtllm.Executor) -> None:
    fresh = [(7 * i) % 150 + 3 for i in range(40)]
    run(executor, request(fresh, 2))
    before = time.monotonic()
    (output,) = run(executor, request(fresh, 4, return_perf_metrics=True))
    metrics = output.last.request_perf_metrics
    assert metrics is not None
    blocks = metrics.kv_cache_metrics
    assert (blocks.num_total_allocated_blocks, blocks.num_reused_blocks) == (3, 2)
    assert (blocks.num_new_allocated_blocks, blocks.num_missed_blocks) == (1, 1)
    assert blocks.kv_cache_hit_rate == pytest.approx(2 / 3)
    times = metrics.timing_metrics
    moments = [
        timedelta(seconds=before),
        times.arrival_time,
        times.first_scheduled_time,
        times.first_token_time,
        times.last_token_time,
    ]
    assert moments == sorted(moments)
    assert metrics.speculative_decoding.acceptance_rate == 0
    assert run(executor, request(fresh, 1))[0].last.request_perf_metrics is None


def test_shutdown_finishes_accepted_requests(tmp_path: Path) -> None:
    executor = start_golden(tmp_path, max_batch_size=1)
    # The last response may come after the reader has stopped. That request is long, so the two
    # others end before.
    asked = [request(PROMPT, tokens, streaming=False) for tokens in (10, 10, 400)]
    ids = executor.enqueue_requests(asked)
    ended: list[int] = []

    def read() -> None:
        while executor.can_enqueue_requests() or len(ended) < 2:
            ended.extend(r.request_id for r in executor.await_responses(timeout=0.001))

    reader = threading.Thread(target=read)
    reader.start()
    executor.shutdown()
    executor.shutdown()
    assert not executor.can_enqueue_requests()
    with pytest.raises(RuntimeError, match="Shutdown called, cannot enqueue requests"):
        executor.enqueue_requests([request(PROMPT, 1)])
    for call in (
        executor.await_responses,
        executor.get_latest_iteration_stats,
        lambda: executor.cancel_request(1),
        executor.get_num_responses_ready,
    ):
        with pytest.raises(RuntimeError, match="Shutdown called"):
            call()
    reader.join()
    assert ended[:2] == ids[:2]


def waits(thread: threading.Thread) -> bool:
    """Return True if the thread is in `Condition.wait`."""
    frame = sys._current_frames().get(thread.ident or 0)
    return frame is not None and frame.f_code is threading.Condition.wait.__code__


def test_shutdown_wakes_a_waiter(tmp_path: Path) -> None:
    executor = start_golden(tmp_path)
    got: list[list[trtllm.Response]] = []
    waiter = threading.Thread(target=lambda: got.append(executor.await_responses()))
    waiter.start()
    deadline = time.monotonic() + 60
    while not waits(waiter):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    executor.shutdown()
    waiter.join(60)
    assert got == [[]]


def test_many_threads(executor: trtllm.Executor) -> None:
    results: dict[int, list[int]] = {}

    def client(index: int) -> None:
        prompt = PROMPT[index : index + 20]
        (request_id,) = executor.enqueue_requests([request(prompt, 6, streaming=False)])
        (response,) = executor.await_responses(request_id, timeout=60.0)
        results[index] = response.result.output_token_ids[0][20:]

    threads = [threading.Thread(target=client, args=(i,)) for i in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index in range(12):
        assert results[index] == run(executor, request(PROMPT[index : index + 20], 6))[0].tokens()


def test_static_batching_answers_once_without_the_prompt(tmp_path: Path) -> None:
    static = trtllm.BatchingType.STATIC
    with start_golden(tmp_path, batching_type=static) as executor:
        outputs = run(executor, request(PROMPT, 5), request(PROMPT[:30], 9))
        stats = stats_until_idle(executor)
    assert [len(o.results) for o in outputs] == [1, 1]
    assert outputs[0].tokens() == GREEDY[:5]
    assert all(s.inflight_batching_stats is None for s in stats)
    assert max(s.static_batching_stats.num_gen_tokens for s in stats) >= 1


def test_a_failing_step_fails_all_active_requests_and_the_executor_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with start_golden(tmp_path) as executor:
        forward = Llama.forward
        with monkeypatch.context() as patch:

            def broken(*_: object) -> None:
                raise MemoryError("no room")

            patch.setattr(Llama, "forward", broken)
            outputs = run(executor, request(PROMPT, 5), request(PROMPT[:30], 9))
        assert Llama.forward is forward
        for output in outputs:
            assert output.error == "Encountered an error in forwardAsync function: no room"
        assert run(executor, request(PROMPT, 3))[0].tokens() == GREEDY[:3]


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        (
            {"decoding_config": trtllm.DecodingConfig(trtllm.DecodingMode.Medusa())},
            "decoding_mode",
        ),
        ({"kv_cache_config": trtllm.KvCacheConfig(max_attention_window=[64])}, "max_attention"),
        (
            {"peft_cache_config": trtllm.PeftCacheConfig(lora_prefetch_dir="/adapters")},
            "lora_prefetch_dir is not supported by the CPU executor",
        ),
        (
            {
                "decoding_config": trtllm.DecodingConfig(
                    lookahead_decoding_config=trtllm.LookaheadDecodingConfig(4, 4, 4)
                )
            },
            "lookahead_decoding_config is not supported by the CPU executor",
        ),
        ({"max_beam_width": 5}, r"max_beam_width \(5\) exceeds the engine's \(4\)"),
    ],
)
def test_unsupported_settings_are_refused_by_name(
    tmp_path: Path, settings: dict, name: str
) -> None:
    with pytest.raises(RuntimeError, match=name):
        start_golden(tmp_path, **settings)


def test_model_path_must_be_a_path() -> None:
    with pytest.raises(TypeError, match="incompatible constructor arguments"):
        trtllm.Executor(None, trtllm.ModelType.DECODER_ONLY, trtllm.ExecutorConfig())
    with pytest.raises(RuntimeError, match="DECODER_ONLY"):
        trtllm.Executor("x", trtllm.ModelType.ENCODER_ONLY, trtllm.ExecutorConfig())


def test_request_stats_are_kept_for_as_many_iterations_as_asked_for(tmp_path: Path) -> None:
    stage = trtllm.RequestStage
    with start_golden(tmp_path, request_stats_max_iterations=10) as executor:
        (output,) = run(executor, request(PROMPT, 4))
        # The last iteration's record is available with its responses.
        records = executor.get_latest_request_stats()
        assert executor.get_latest_request_stats() == []
        told = [
            (only.stage, only.num_generated_tokens)
            for (only,) in (r.request_stats for r in records)
        ]
        context = [stage.CONTEXT_IN_PROGRESS] * (len(records) - 4)
        assert [found for found, _ in told] == [
            *context,
            *[stage.GENERATION_IN_PROGRESS] * 3,
            stage.GENERATION_COMPLETE,
        ]
        assert [count for _, count in told[-4:]] == [1, 2, 3, 4]
        (last,) = records[-1].request_stats
        assert (last.scheduled, last.paused) == (True, False)
        assert last.context_prefill_position == len(PROMPT)
        assert last.avg_num_decoded_tokens_per_iter == 1
        assert last.alloc_total_blocks_per_request == -(-len(PROMPT) // 16)
        assert '"GENERATION_COMPLETE"' in last.to_json_str()
        run(executor, request(PROMPT, 30))
        assert len(executor.get_latest_request_stats()) == 10
    assert output.tokens() == GREEDY[:4]


def test_no_request_stats_are_kept_by_default(executor: trtllm.Executor) -> None:
    run(executor, request(PROMPT, 2))
    assert executor.get_latest_request_stats() == []

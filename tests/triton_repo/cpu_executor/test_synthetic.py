"""The synthetic engine: scripted tokens, pace, and many concurrent requests."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.executor_client import gather, request, run, start
from triton_repo.cpu_executor import bindings as trtllm
from triton_repo.cpu_executor.synthetic import SyntheticPace, build


def fast(folder: Path, **more: Any) -> Path:
    return build(
        folder, **{"vocab_size": 100, "tokens_per_second": 2000.0, "first_token_ms": 1.0, **more}
    )


def test_ids_count_up_from_the_prompt_without_the_end(tmp_path: Path) -> None:
    with start(fast(tmp_path)) as executor:
        plain, ended = run(
            executor, request([5, 96], 7), request([5, 96], 7, end_id=98, streaming=False)
        )
    assert plain.tokens() == [97, 98, 99, 0, 1, 2, 3]
    assert plain.last.finish_reasons == [trtllm.FinishReason.LENGTH]
    assert ended.tokens() == [5, 96, 97, 99, 0, 1, 2, 3, 4]


def test_a_cycle_may_end_the_sequence_or_stop(tmp_path: Path) -> None:
    with start(fast(tmp_path, tokens=[7, 8, 9])) as executor:
        cycled, ended, stopped, both = run(
            executor,
            request([1], 5),
            request([1], 5, end_id=9),
            request([1], 50, stop_words=[[9, 7]]),
            request([1], 3, num_return_sequences=2),
        )
    assert cycled.tokens() == [7, 8, 9, 7, 8]
    assert ended.tokens() == [7, 8]
    assert ended.last.finish_reasons == [trtllm.FinishReason.END_ID]
    assert stopped.tokens() == [7, 8, 9, 7]
    assert both.tokens(0) == both.tokens(1) == [7, 8, 9]


def test_pace(tmp_path: Path) -> None:
    engine = build(tmp_path, vocab_size=100, tokens_per_second=100.0, first_token_ms=60.0)
    pace = SyntheticPace(tokens_per_second=100.0, first_token_ms=60.0)
    with start(engine) as executor:
        asked = time.monotonic()
        (i,) = executor.enqueue_requests([request([1], 50)])
        tokens, final = 0, False
        while not final:
            for response in executor.await_responses(i, 30.0):
                tokens += len(response.result.output_token_ids[0])
                final = response.result.is_final
            # No token may come early. Their delay depends on the machine.
            assert tokens <= pace.due(time.monotonic() - asked)
    assert tokens == 50


def test_a_look_that_is_late_takes_all_that_is_due(tmp_path: Path) -> None:
    """Check that a late poll returns all due tokens, so requests keep their pace under load."""
    engine = build(tmp_path, vocab_size=100, tokens_per_second=1e6, first_token_ms=0.0)
    with start(engine) as executor:
        (output,) = run(executor, request([1], 5000))
    assert len(output.tokens()) == 5000
    assert len(output.results) < 100


def test_a_late_request_does_not_wait_for_the_others(tmp_path: Path) -> None:
    engine = build(tmp_path, vocab_size=100, tokens_per_second=0.01, first_token_ms=10.0)
    with start(engine) as executor:
        (slow,) = executor.enqueue_requests([request([1], 10)])
        assert executor.await_responses(slow, 30.0)
        (late,) = executor.enqueue_requests([request([2], 10)])
        assert executor.await_responses(late, 30.0)
        for i in (slow, late):
            executor.cancel_request(i)
        outputs = gather(executor, [slow, late])
    assert [o.last.finish_reasons for o in outputs] == [[trtllm.FinishReason.CANCELLED]] * 2


def test_thousands_of_requests_are_cheap(tmp_path: Path) -> None:
    engine = build(tmp_path, vocab_size=100, tokens_per_second=20.0, first_token_ms=10.0)
    with start(engine) as executor:
        before = time.process_time()
        ids = executor.enqueue_requests([request([i % 90], 20) for i in range(2000)])
        outputs = gather(executor, ids)
        spent = time.process_time() - before
    assert all(len(o.tokens()) == 20 for o in outputs)
    # Each of the 40,000 tokens had its own response.
    assert spent < 5


def test_statistics(tmp_path: Path) -> None:
    with start(fast(tmp_path)) as executor:
        run(executor, request([1] * 70, 10))
        stats = executor.get_latest_iteration_stats()
        while sum(s.num_completed_requests for s in stats) == 0:  # reported last
            stats += executor.get_latest_iteration_stats()
    assert max(s.kv_cache_stats.used_num_blocks for s in stats) == 2
    assert stats[0].inflight_batching_stats.num_context_requests == 1
    assert stats[-1].num_active_requests == 0
    assert stats[-1].kv_cache_stats.used_num_blocks == 0
    assert sum(s.num_completed_requests for s in stats) == 1


def test_adapters_are_cached_though_they_change_nothing(tmp_path: Path) -> None:
    fast(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["build_config"]["plugin_config"] = {"lora_plugin": "float16"}
    config["build_config"]["lora_config"] = {"lora_target_modules": ["attn_q"], "max_lora_rank": 8}
    config["pretrained_config"] |= {"hidden_size": 8, "num_attention_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    rows = np.array([[1, 0, 2]], np.int32)
    weights = np.zeros((1, 32), np.float16)
    with start(tmp_path) as executor:
        unknown, loaded = run(
            executor,
            request([1], 2, lora_config=trtllm.LoraConfig(1)),
            request([1], 2, lora_config=trtllm.LoraConfig(2, weights, rows)),
        )
        (again,) = run(executor, request([1], 2, lora_config=trtllm.LoraConfig(2)))
    assert "LoRA task 1 not found in cache" in str(unknown.error)
    assert loaded.tokens() == again.tokens() == [2, 3]


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"speed": 3}, r"synthetic: found \['speed'\], allowed"),
        ({"tokens_per_second": 0}, "tokens_per_second: found 0, allowed > 0"),
        ({"first_token_ms": -1}, "first_token_ms: found -1, allowed >= 0"),
    ],
)
def test_wrong_settings_are_named(tmp_path: Path, settings: dict[str, Any], text: str) -> None:
    fast(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["synthetic"] = settings
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=text):
        start(tmp_path)


def test_pace_and_its_times_agree() -> None:
    pace = SyntheticPace(tokens_per_second=30.0, first_token_ms=100.0)
    for count in range(200):
        assert pace.due(pace.time_of(count) - 1e-6) == count
        assert pace.due(pace.time_of(count) + 1e-6) == count + 1

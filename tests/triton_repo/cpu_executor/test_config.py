"""The executor's request and settings classes: names, keywords, validation and repr."""

from __future__ import annotations

import pickle
from datetime import timedelta
from typing import Any

import numpy as np
import pytest

from triton_repo.cpu_executor import bindings as trtllm

FAILED = r"^\[TensorRT-LLM\]\[ERROR\] Assertion failed: "


@pytest.mark.parametrize(
    ("keyword", "value", "text"),
    [
        ("beam_width", 0, "beamWidth > 0"),
        ("beam_width", 1025, "kMaxBeamWidth"),
        ("top_k", -1, "topK"),
        ("top_p", 0.0, "topP"),
        ("top_p", 1.5, "topP"),
        ("top_p_min", 1.5, "topPMin"),
        ("top_p_decay", 0.0, "topPDecay"),
        ("top_p_reset_ids", -1, "topPResetIds"),
        ("temperature", -0.1, "temperature"),
        ("min_length", -1, "minTokens"),
        ("min_tokens", -1, "minTokens"),
        ("beam_search_diversity_rate", -1.0, "beamSearchDiversityRate"),
        ("repetition_penalty", 0.0, "repetitionPenalty"),
        ("length_penalty", -1.0, "lengthPenalty"),
        ("early_stopping", -1, "earlyStopping"),
        ("no_repeat_ngram_size", -1, "value >= 0"),
        ("num_return_sequences", 0, "numReturnSequences"),
        ("seed", -1, "seed"),
    ],
)
def test_sampling_ranges(keyword: str, value: Any, text: str) -> None:
    with pytest.raises(RuntimeError, match=FAILED + ".*" + text):
        trtllm.SamplingConfig(**{keyword: value})


def test_sampling_keeps_what_was_given() -> None:
    config = trtllm.SamplingConfig(
        2,
        top_k=np.int32(3),
        temperature=1,
        random_seed=2**63,
        min_length=4,
        presence_penalty=-0.1,
        num_return_sequences=2,
    )
    assert (config.beam_width, config.top_k, config.top_p) == (2, 3, None)
    assert config.temperature == 1.0
    assert config.presence_penalty == float(np.float32(-0.1))
    assert config.seed == config.random_seed == 2**63
    assert config.min_tokens == config.min_length == 4
    config.length_penalty = -3
    assert config.length_penalty == -3
    with pytest.raises(RuntimeError, match="numReturnSequences"):
        config.num_return_sequences = 3
    with pytest.raises(RuntimeError, match="topP"):
        config.top_p = 2
    assert vars(pickle.loads(pickle.dumps(config))) == vars(config)


def test_new_spelling_wins() -> None:
    assert trtllm.SamplingConfig(seed=1, random_seed=2, min_tokens=3, min_length=4).seed == 1
    assert trtllm.Request([1], max_tokens=3, max_new_tokens=5).max_new_tokens == 3
    assert trtllm.Request([1], max_new_tokens=5).max_tokens == 5


@pytest.mark.parametrize(
    "make",
    [
        lambda: trtllm.SamplingConfig(top_q=1),
        lambda: trtllm.SamplingConfig(top_k=1.0),
        lambda: trtllm.SamplingConfig(temperature="1"),
        lambda: trtllm.OutputConfig(return_everything=True),
        lambda: trtllm.Request([1], 1, unknown=1),
        lambda: trtllm.Request([1]),
        lambda: trtllm.Request([1.5], 1),
        lambda: trtllm.Request([2**31], 1),
        lambda: trtllm.Request([1], 1, lora_config=3),
        lambda: trtllm.Request([1], 1, embedding_bias=object()),
        lambda: trtllm.LoraConfig(weights=np.zeros((1, 1)), config=np.zeros((1, 3))),
        lambda: trtllm.ExtendedRuntimePerfKnobConfig(cuda_graph_mode=True),
        lambda: trtllm.KvCacheRetentionConfig([], 35, 100),
        lambda: trtllm.ExecutorConfig(prefix_caching=True),
        lambda: trtllm.Response(1),
    ],
)
def test_wrong_names_and_types_are_type_errors(make: Any) -> None:
    with pytest.raises(TypeError):
        make()


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: trtllm.Request([], 1), r"!mInputTokenIds\.empty\(\)"),
        (lambda: trtllm.Request([1], 0), "mMaxNewTokens > 0"),
        (lambda: trtllm.Request([1], 1, embedding_bias=np.zeros((1, 4))), "embeddingBias"),
        (lambda: trtllm.Request([1], 1, priority=1.5), "priority"),
        (
            lambda: trtllm.Request(
                [1],
                1,
                sampling_config=trtllm.SamplingConfig(2),
                guided_decoding_params=trtllm.GuidedDecodingParams(
                    trtllm.GuidedDecodingParams.GuideType.JSON
                ),
            ),
            r"Guided decoding does not support with beam search\.",
        ),
        (
            lambda: trtllm.LoraConfig(1, weights=np.zeros((1, 4))),
            "Request for LoRA inference with lora weights must also have lora config",
        ),
        (
            lambda: trtllm.LoraConfig(1, np.zeros((1, 1, 4)), np.zeros((1, 3), np.int32)),
            "Expected weights tensor to have 2 dimensions",
        ),
        (
            lambda: trtllm.LoraConfig(1, np.zeros((1, 4)), np.zeros((1, 1, 3), np.int32)),
            "Expected config tensor to have 2 dimensions",
        ),
        (
            lambda: trtllm.LoraConfig(1, np.zeros((2, 4)), np.zeros((1, 3), np.int32)),
            "Expected dim 0 of lora weights and lora config to have the same size",
        ),
        (lambda: trtllm.PromptTuningConfig(np.zeros(4)), "2-D"),
        (lambda: trtllm.ExternalDraftTokensConfig([1], None, 2.0), "mAcceptanceThreshold"),
        (
            lambda: trtllm.KvCacheRetentionConfig.TokenRangeRetentionConfig(0, None, 101),
            r"Invalid priority value\. Must be between 0 and 100",
        ),
        (
            lambda: trtllm.KvCacheRetentionConfig(
                [
                    trtllm.KvCacheRetentionConfig.TokenRangeRetentionConfig(4, 9, 1),
                    trtllm.KvCacheRetentionConfig.TokenRangeRetentionConfig(0, 5, 1),
                ]
            ),
            "must not overlap",
        ),
        (
            lambda: trtllm.GuidedDecodingParams(trtllm.GuidedDecodingParams.GuideType.REGEX),
            "guide string must be provided",
        ),
        (lambda: trtllm.KvCacheConfig(max_tokens=0), "value > 0"),
        (lambda: trtllm.KvCacheConfig(free_gpu_memory_fraction=1.5), "0 <= value <= 1"),
        (
            lambda: trtllm.ExecutorConfig(
                parallel_config=trtllm.ParallelConfig(
                    communication_mode=trtllm.CommunicationMode.ORCHESTRATOR
                )
            ),
            "When using ORCHESTRATOR mode, orchestrator config must be set",
        ),
        (lambda: trtllm.Response(1, "text").result, r"!hasError\(\)"),
        (lambda: trtllm.Response(1, trtllm.Result()).error_msg, r"hasError\(\)"),
    ],
)
def test_checks_are_runtime_errors(make: Any, text: str) -> None:
    with pytest.raises(RuntimeError, match=FAILED + ".*" + text):
        make()


def test_request_takes_what_numpy_takes() -> None:
    request = trtllm.Request(
        np.array([1, 2], np.int32),
        np.int64(3),
        streaming=None,
        stop_words=[np.array([4, 5])],
        bad_words=[[np.int32(6)]],
        embedding_bias=[0.5, 1.5],
        lora_config=trtllm.LoraConfig(np.uint64(7), [[0.0]], np.zeros((1, 3), np.int32)),
    )
    assert request.input_token_ids == [1, 2]
    assert request.streaming is False
    assert (request.stop_words, request.bad_words) == ([[4, 5]], [[6]])
    assert request.embedding_bias is not None
    assert request.embedding_bias.dtype == np.float32
    assert request.lora_config is not None
    assert request.lora_config.task_id == 7


def test_getters_of_request_parts_return_copies() -> None:
    request = trtllm.Request([1], 1)
    request.output_config.exclude_input_from_output = True
    assert not request.output_config.exclude_input_from_output
    output = request.output_config
    output.exclude_input_from_output = True
    request.output_config = output
    assert request.output_config.exclude_input_from_output


def test_read_only_fields() -> None:
    config = trtllm.LoraConfig(1)
    with pytest.raises(AttributeError, match="can't set attribute 'task_id'"):
        config.task_id = 2


def test_executor_config_defaults_and_references() -> None:
    config = trtllm.ExecutorConfig()
    assert config.normalize_log_probs
    assert config.iter_stats_max_iterations == 1000
    assert config.request_stats_max_iterations == 0
    assert config.batching_type == trtllm.BatchingType.INFLIGHT
    assert config.kv_cache_config.enable_block_reuse
    assert config.max_queue_size is None
    config.kv_cache_config.max_tokens = 64
    assert config.kv_cache_config.max_tokens == 64
    knobs = config.extended_runtime_perf_knob_config
    knobs.multi_block_mode = False
    assert config.extended_runtime_perf_knob_config.multi_block_mode
    policy = trtllm.CapacitySchedulerPolicy.MAX_UTILIZATION
    assert trtllm.SchedulerConfig(policy).capacity_scheduler_policy == policy
    copied = pickle.loads(pickle.dumps(config))
    assert copied.kv_cache_config.max_tokens == 64


def test_durations_are_timedeltas_or_float_seconds() -> None:
    part = trtllm.KvCacheRetentionConfig.TokenRangeRetentionConfig
    assert part(0, None, 35, 1.5).duration_ms == timedelta(seconds=1.5)
    assert part(0, None, 35, timedelta(1)) == part(0, None, 35, timedelta(1))
    assert part(0, None, 35) != part(0, 4, 35)
    with pytest.raises(TypeError, match="timedelta or float seconds"):
        part(0, None, 35, 10)


@pytest.mark.parametrize(
    ("mode", "true"),
    [
        ("Auto", {"isAuto"}),
        ("TopK", {"isTopK", "isTopKorTopP"}),
        ("TopP", {"isTopP", "isTopKorTopP"}),
        ("TopKTopP", {"isTopK", "isTopP", "isTopKorTopP", "isTopKandTopP"}),
        ("BeamSearch", {"isBeamSearch"}),
        ("Medusa", {"isMedusa"}),
        ("Lookahead", {"isLookahead"}),
        ("ExplicitDraftTokens", {"isExplicitDraftTokens"}),
        ("Eagle", {"isEagle"}),
    ],
)
def test_decoding_modes(mode: str, true: set[str]) -> None:
    made = getattr(trtllm.DecodingMode, mode)()
    assert made == getattr(trtllm.DecodingMode, mode)()
    tests = {name for name in dir(made) if name.startswith("is")}
    assert {name for name in tests if getattr(made, name)()} == true


def test_results_and_responses() -> None:
    result = trtllm.Result()
    result.output_token_ids = [[1]]
    response = trtllm.Response(3, result, client_id=4)
    assert (response.request_id, response.client_id) == (3, 4)
    assert not response.has_error()
    assert response.result.output_token_ids == [[1]]
    failed = trtllm.Response(3, "text")
    assert (failed.has_error(), failed.error_msg) == (True, "text")


def test_enum_values() -> None:
    assert [int(reason) for reason in trtllm.FinishReason] == list(range(6))
    assert trtllm.ModelType.DECODER_ONLY == 0
    assert trtllm.GuidedDecodingConfig.GuidedDecodingBackend.XGRAMMAR == 0
    assert trtllm.CapacitySchedulerPolicy.GUARANTEED_NO_EVICT == 1


def test_an_array_of_one_is_a_number_and_no_other_array_is() -> None:
    """Check arrays with one element, as upstream's model.py passes lookahead sizes as [1, 1]."""
    config = trtllm.LookaheadDecodingConfig(*(np.array([[n]], np.int32) for n in (7, 5, 3)))
    sizes = (config.max_window_size, config.max_ngram_size, config.max_verification_set_size)
    assert sizes == (7, 5, 3)
    assert trtllm.MropeConfig(np.zeros(4), np.array([-2])).mrope_position_deltas == -2
    for wrong in (np.array([1, 2]), np.array([1.0])):
        with pytest.raises(TypeError):
            trtllm.LookaheadDecodingConfig(wrong, 5, 3)

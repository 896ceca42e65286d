"""``ExecutorConfig`` and the classes of its fields (``tensorrt_llm.bindings.executor``, v0.17).

Fields that matter only on a GPU are stored and can be read back, but have no effect.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from enum import IntEnum
from typing import Any

from triton_repo.cpu_executor.checks import (
    Field,
    ReadOnly,
    as_bool,
    as_float,
    as_int,
    as_ints,
    as_str,
    check,
    optional,
)
from triton_repo.cpu_executor.decoding_config import DecodingConfig
from triton_repo.cpu_executor.enums import (
    BatchingType,
    CapacitySchedulerPolicy,
    CommunicationMode,
    CommunicationType,
    ContextChunkingPolicy,
)


def _positive(value: int | None) -> str | None:
    return None if value is None or value > 0 else f"value > 0 (found {value})"


def _fraction(value: float | None) -> str | None:
    return None if value is None or 0 <= value <= 1 else f"0 <= value <= 1 (found {value})"


class DynamicBatchConfig:
    enable_batch_size_tuning = ReadOnly(as_bool)
    enable_max_num_tokens_tuning = ReadOnly(as_bool)
    dynamic_batch_moving_average_window = ReadOnly(as_int)

    def __init__(
        self,
        enable_batch_size_tuning: bool,
        enable_max_num_tokens_tuning: bool,
        dynamic_batch_moving_average_window: int,
    ) -> None:
        self.enable_batch_size_tuning = enable_batch_size_tuning
        self.enable_max_num_tokens_tuning = enable_max_num_tokens_tuning
        self.dynamic_batch_moving_average_window = dynamic_batch_moving_average_window


class SchedulerConfig:
    """Policies that decide when requests start, and how their prompts are split into chunks."""

    capacity_scheduler_policy = ReadOnly(CapacitySchedulerPolicy)
    context_chunking_policy = ReadOnly(optional(ContextChunkingPolicy))
    dynamic_batch_config = ReadOnly[DynamicBatchConfig | None](lambda value: value)

    def __init__(
        self,
        capacity_scheduler_policy: CapacitySchedulerPolicy = (
            CapacitySchedulerPolicy.GUARANTEED_NO_EVICT
        ),
        context_chunking_policy: ContextChunkingPolicy | None = None,
        dynamic_batch_config: DynamicBatchConfig | None = None,
    ) -> None:
        self.capacity_scheduler_policy = capacity_scheduler_policy
        self.context_chunking_policy = context_chunking_policy
        self.dynamic_batch_config = dynamic_batch_config


class KvCacheConfig:
    """Limits of the KV cache.

    ``max_tokens`` is the capacity of the cache in tokens, for all sequences.
    """

    enable_block_reuse = Field(as_bool)
    max_tokens = Field(optional(as_int), _positive)
    max_attention_window = Field(optional(as_ints))
    sink_token_length = Field(optional(as_int))
    free_gpu_memory_fraction = Field(optional(as_float), _fraction)
    host_cache_size = Field(optional(as_int))
    onboard_blocks = Field(as_bool)
    cross_kv_cache_fraction = Field(optional(as_float), _fraction)
    secondary_offload_min_priority = Field(optional(as_int))
    event_buffer_max_size = Field(as_int)

    def __init__(
        self,
        enable_block_reuse: bool = True,
        max_tokens: int | None = None,
        max_attention_window: Iterable[int] | None = None,
        sink_token_length: int | None = None,
        free_gpu_memory_fraction: float | None = None,
        host_cache_size: int | None = None,
        onboard_blocks: bool = True,
        cross_kv_cache_fraction: float | None = None,
        secondary_offload_min_priority: int | None = None,
        event_buffer_max_size: int = 0,
    ) -> None:
        self.enable_block_reuse = enable_block_reuse
        self.max_tokens = max_tokens
        self.max_attention_window = max_attention_window
        self.sink_token_length = sink_token_length
        self.free_gpu_memory_fraction = free_gpu_memory_fraction
        self.host_cache_size = host_cache_size
        self.onboard_blocks = onboard_blocks
        self.cross_kv_cache_fraction = cross_kv_cache_fraction
        self.secondary_offload_min_priority = secondary_offload_min_priority
        self.event_buffer_max_size = event_buffer_max_size


class PeftCacheConfig:
    """Limits of the LoRA caches. ``host_cache_size`` is in bytes; None selects 1 GiB."""

    num_host_module_layer = ReadOnly(as_int)
    num_device_module_layer = ReadOnly(as_int)
    optimal_adapter_size = ReadOnly(as_int)
    max_adapter_size = ReadOnly(as_int)
    num_put_workers = ReadOnly(as_int)
    num_ensure_workers = ReadOnly(as_int)
    num_copy_streams = ReadOnly(as_int)
    max_pages_per_block_host = ReadOnly(as_int)
    max_pages_per_block_device = ReadOnly(as_int)
    device_cache_percent = ReadOnly(optional(as_float), _fraction)
    host_cache_size = ReadOnly(optional(as_int))
    lora_prefetch_dir = ReadOnly(optional(as_str))

    def __init__(
        self,
        num_host_module_layer: int = 0,
        num_device_module_layer: int = 0,
        optimal_adapter_size: int = 8,
        max_adapter_size: int = 64,
        num_put_workers: int = 1,
        num_ensure_workers: int = 1,
        num_copy_streams: int = 1,
        max_pages_per_block_host: int = 24,
        max_pages_per_block_device: int = 8,
        device_cache_percent: float | None = None,
        host_cache_size: int | None = None,
        lora_prefetch_dir: str | None = None,
    ) -> None:
        self.num_host_module_layer = num_host_module_layer
        self.num_device_module_layer = num_device_module_layer
        self.optimal_adapter_size = optimal_adapter_size
        self.max_adapter_size = max_adapter_size
        self.num_put_workers = num_put_workers
        self.num_ensure_workers = num_ensure_workers
        self.num_copy_streams = num_copy_streams
        self.max_pages_per_block_host = max_pages_per_block_host
        self.max_pages_per_block_device = max_pages_per_block_device
        self.device_cache_percent = device_cache_percent
        self.host_cache_size = host_cache_size
        self.lora_prefetch_dir = lora_prefetch_dir


class OrchestratorConfig:
    is_orchestrator = Field(as_bool)
    worker_executable_path = Field(as_str)
    orch_leader_comm = Field[Any](lambda value: value)
    spawn_processes = Field(as_bool)

    def __init__(
        self,
        is_orchestrator: bool = True,
        worker_executable_path: str = "",
        orch_leader_comm: Any = None,
        spawn_processes: bool = True,
    ) -> None:
        self.is_orchestrator = is_orchestrator
        self.worker_executable_path = worker_executable_path
        self.orch_leader_comm = orch_leader_comm
        self.spawn_processes = spawn_processes


class ParallelConfig:
    communication_type = Field(CommunicationType)
    communication_mode = Field(CommunicationMode)
    device_ids = Field(optional(as_ints))
    participant_ids = Field(optional(as_ints))
    orchestrator_config = Field[OrchestratorConfig | None](lambda value: value)

    def __init__(
        self,
        communication_type: CommunicationType = CommunicationType.MPI,
        communication_mode: CommunicationMode = CommunicationMode.LEADER,
        device_ids: Iterable[int] | None = None,
        participant_ids: Iterable[int] | None = None,
        orchestrator_config: OrchestratorConfig | None = None,
    ) -> None:
        self.communication_type = communication_type
        self.communication_mode = communication_mode
        self.device_ids = device_ids
        self.participant_ids = participant_ids
        self.orchestrator_config = orchestrator_config


class ExtendedRuntimePerfKnobConfig:
    """Performance options of the GPU runtime.

    The constructor takes only two of the fields. The CUDA graph fields are set as attributes.
    """

    multi_block_mode = Field(as_bool)
    enable_context_fmha_fp32_acc = Field(as_bool)
    cuda_graph_mode = Field(as_bool)
    cuda_graph_cache_size = Field(as_int)

    def __init__(
        self, multi_block_mode: bool = True, enable_context_fmha_fp32_acc: bool = False
    ) -> None:
        self.multi_block_mode = multi_block_mode
        self.enable_context_fmha_fp32_acc = enable_context_fmha_fp32_acc
        self.cuda_graph_mode = False
        self.cuda_graph_cache_size = 0


class GuidedBackend(IntEnum):
    """Backends of guided decoding; LLGUIDANCE was added after v0.17."""

    XGRAMMAR = 0
    LLGUIDANCE = 1


class GuidedDecodingConfig:
    """Settings of guided decoding for the model's tokenizer.

    ``tokenizer_str`` is the text of ``tokenizer.json``. ``stop_token_ids`` end the output of a
    guided request, like the request's ``end_id``; None selects the tokenizer's EOS ids.
    ``encoded_vocab`` has the tokens in the order of their ids, and has no effect here.
    """

    GuidedDecodingBackend = GuidedBackend

    backend = Field(GuidedBackend)
    encoded_vocab = Field[Any](optional(list))
    tokenizer_str = Field(optional(as_str))
    stop_token_ids = Field(optional(as_ints))

    def __init__(
        self,
        backend: GuidedBackend,
        encoded_vocab: Iterable[str] | None = None,
        tokenizer_str: str | None = None,
        stop_token_ids: Iterable[int] | None = None,
    ) -> None:
        self.backend = backend
        self.encoded_vocab = encoded_vocab
        self.tokenizer_str = tokenizer_str
        self.stop_token_ids = stop_token_ids


class ExecutorConfig:
    """The settings of an ``Executor``.

    Some settings are objects of other classes. ``scheduler_config`` and ``kv_cache_config`` return
    the stored objects. ``parallel_config``, ``peft_cache_config``, ``decoding_config`` and
    ``extended_runtime_perf_knob_config`` return copies. An instance also accepts other attributes.
    """

    max_beam_width = Field(as_int, _positive)
    enable_chunked_context = Field(as_bool)
    normalize_log_probs = Field(as_bool)
    iter_stats_max_iterations = Field(as_int)
    request_stats_max_iterations = Field(as_int)
    batching_type = Field(BatchingType)
    max_batch_size = Field(optional(as_int), _positive)
    max_num_tokens = Field(optional(as_int), _positive)
    gpu_weights_percent = Field(as_float, _fraction)
    max_queue_size = Field(optional(as_int))
    recv_poll_period_ms = Field(as_int)
    max_seq_idle_microseconds = Field(as_int)

    def __init__(
        self,
        max_beam_width: int = 1,
        scheduler_config: SchedulerConfig | None = None,
        kv_cache_config: KvCacheConfig | None = None,
        enable_chunked_context: bool = False,
        normalize_log_probs: bool = True,
        iter_stats_max_iterations: int = 1000,
        request_stats_max_iterations: int = 0,
        batching_type: BatchingType = BatchingType.INFLIGHT,
        max_batch_size: int | None = None,
        max_num_tokens: int | None = None,
        parallel_config: ParallelConfig | None = None,
        peft_cache_config: PeftCacheConfig | None = None,
        logits_post_processor_config: Any = None,
        decoding_config: DecodingConfig | None = None,
        gpu_weights_percent: float = 1.0,
        max_queue_size: int | None = None,
        extended_runtime_perf_knob_config: ExtendedRuntimePerfKnobConfig | None = None,
        debug_config: Any = None,
        recv_poll_period_ms: int = 0,
        max_seq_idle_microseconds: int = 180_000_000,
        spec_dec_config: Any = None,
        guided_decoding_config: GuidedDecodingConfig | None = None,
    ) -> None:
        self.max_beam_width = max_beam_width
        self.scheduler_config = scheduler_config or SchedulerConfig()
        self.kv_cache_config = kv_cache_config or KvCacheConfig()
        self.enable_chunked_context = enable_chunked_context
        self.normalize_log_probs = normalize_log_probs
        self.iter_stats_max_iterations = iter_stats_max_iterations
        self.request_stats_max_iterations = request_stats_max_iterations
        self.batching_type = batching_type
        self.max_batch_size = max_batch_size
        self.max_num_tokens = max_num_tokens
        self.parallel_config = parallel_config
        self.peft_cache_config = peft_cache_config or PeftCacheConfig()
        self.logits_post_processor_config = logits_post_processor_config
        self.decoding_config = decoding_config
        self.gpu_weights_percent = gpu_weights_percent
        self.max_queue_size = max_queue_size
        self.extended_runtime_perf_knob_config = (
            extended_runtime_perf_knob_config or ExtendedRuntimePerfKnobConfig()
        )
        self.debug_config = debug_config
        self.recv_poll_period_ms = recv_poll_period_ms
        self.max_seq_idle_microseconds = max_seq_idle_microseconds
        self.spec_dec_config = spec_dec_config
        self.guided_decoding_config = guided_decoding_config

    @property
    def parallel_config(self) -> ParallelConfig | None:
        return copy.copy(self._parallel_config)

    @parallel_config.setter
    def parallel_config(self, value: ParallelConfig | None) -> None:
        self._parallel_config = value
        if value is not None and value.communication_mode == CommunicationMode.ORCHESTRATOR:
            check(
                value.orchestrator_config is not None,
                "When using ORCHESTRATOR mode, orchestrator config must be set",
            )

    @property
    def peft_cache_config(self) -> PeftCacheConfig:
        return copy.copy(self._peft_cache_config)

    @peft_cache_config.setter
    def peft_cache_config(self, value: PeftCacheConfig) -> None:
        self._peft_cache_config = value

    @property
    def decoding_config(self) -> DecodingConfig | None:
        return copy.copy(self._decoding_config)

    @decoding_config.setter
    def decoding_config(self, value: DecodingConfig | None) -> None:
        self._decoding_config = value

    @property
    def extended_runtime_perf_knob_config(self) -> ExtendedRuntimePerfKnobConfig:
        return copy.copy(self._extended_runtime_perf_knob_config)

    @extended_runtime_perf_knob_config.setter
    def extended_runtime_perf_knob_config(self, value: ExtendedRuntimePerfKnobConfig) -> None:
        self._extended_runtime_perf_knob_config = value

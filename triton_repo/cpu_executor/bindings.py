"""The names of ``tensorrt_llm.bindings.executor`` (TensorRT-LLM v0.17), implemented with numpy.

``model.py`` imports this module where the real package is not installed.
"""

from triton_repo.cpu_executor.decoding_config import DecodingConfig, DecodingMode
from triton_repo.cpu_executor.enums import (
    BatchingType,
    CapacitySchedulerPolicy,
    CommunicationMode,
    CommunicationType,
    ContextChunkingPolicy,
    FinishReason,
    ModelType,
    RequestStage,
    RequestType,
)
from triton_repo.cpu_executor.executor import Executor
from triton_repo.cpu_executor.executor_config import (
    DynamicBatchConfig,
    ExecutorConfig,
    ExtendedRuntimePerfKnobConfig,
    GuidedDecodingConfig,
    KvCacheConfig,
    OrchestratorConfig,
    ParallelConfig,
    PeftCacheConfig,
    SchedulerConfig,
)
from triton_repo.cpu_executor.request import Request
from triton_repo.cpu_executor.request_config import (
    EagleConfig,
    ExternalDraftTokensConfig,
    GuidedDecodingParams,
    KvCacheRetentionConfig,
    LookaheadDecodingConfig,
    LoraConfig,
    MropeConfig,
    PromptTuningConfig,
)
from triton_repo.cpu_executor.result import (
    KvCacheMetrics,
    RequestPerfMetrics,
    Response,
    Result,
    SpeculativeDecodingMetrics,
    TimingMetrics,
)
from triton_repo.cpu_executor.sampling_config import OutputConfig, SamplingConfig
from triton_repo.cpu_executor.stats import (
    InflightBatchingStats,
    IterationStats,
    KvCacheStats,
    RequestStats,
    RequestStatsPerIteration,
    StaticBatchingStats,
)

__version__ = "0.17.0"

__all__ = [
    "BatchingType",
    "CapacitySchedulerPolicy",
    "CommunicationMode",
    "CommunicationType",
    "ContextChunkingPolicy",
    "DecodingConfig",
    "DecodingMode",
    "DynamicBatchConfig",
    "EagleConfig",
    "Executor",
    "ExecutorConfig",
    "ExtendedRuntimePerfKnobConfig",
    "ExternalDraftTokensConfig",
    "FinishReason",
    "GuidedDecodingConfig",
    "GuidedDecodingParams",
    "InflightBatchingStats",
    "IterationStats",
    "KvCacheConfig",
    "KvCacheMetrics",
    "KvCacheRetentionConfig",
    "KvCacheStats",
    "LookaheadDecodingConfig",
    "LoraConfig",
    "ModelType",
    "MropeConfig",
    "OrchestratorConfig",
    "OutputConfig",
    "ParallelConfig",
    "PeftCacheConfig",
    "PromptTuningConfig",
    "Request",
    "RequestPerfMetrics",
    "RequestStage",
    "RequestStats",
    "RequestStatsPerIteration",
    "RequestType",
    "Response",
    "Result",
    "SamplingConfig",
    "SchedulerConfig",
    "SpeculativeDecodingMetrics",
    "StaticBatchingStats",
    "TimingMetrics",
]

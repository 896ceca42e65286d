"""The LLM API: TensorRT-LLM's if it is installed on this host, else the CPU executor's."""

from collections.abc import Callable
from typing import Any

try:
    from tensorrt_llm import LLM, SamplingParams
    from tensorrt_llm._utils import global_mpi_rank, global_mpi_size
    from tensorrt_llm.executor.request import LoRARequest
    from tensorrt_llm.llmapi.llm_utils import update_llm_args_with_extra_dict
except ModuleNotFoundError as missing:
    # Use the CPU executor only if TensorRT-LLM is not installed. If an installed TensorRT-LLM fails
    # to load, raise its error.
    if missing.name != "tensorrt_llm":
        raise
    from triton_repo.cpu_executor.llmapi.llm import LLM
    from triton_repo.cpu_executor.llmapi.llm_args import update_llm_args_with_extra_dict
    from triton_repo.cpu_executor.llmapi.lora import LoRARequest
    from triton_repo.cpu_executor.llmapi.ranks import global_mpi_rank, global_mpi_size
    from triton_repo.cpu_executor.llmapi.sampling_params import SamplingParams

__all__ = ["LoRARequest", "SamplingParams", "start", "upstream_watch"]


def start(arguments: dict[str, Any]) -> Any:
    """Create the `LLM`, with the arguments that are not None, and return it.

    Raises RuntimeError if this process is one of several MPI ranks. `LLM` raises its own errors for
    wrong arguments.
    """
    if global_mpi_size() > 1 or global_mpi_rank() > 0:
        raise RuntimeError(
            "llmapi: this process is one of several MPI ranks; start Triton without mpirun, or by "
            "trtllm-llmapi-launch, which gives the model a single one"
        )
    given = {name: value for name, value in arguments.items() if value is not None}
    return LLM(**update_llm_args_with_extra_dict({}, given))


def upstream_watch(period_s: float, on_left: Callable[[Any], object]) -> Any:
    """Return a watcher for disconnected clients that behaves like upstream's. Only for tests.

    Args:
        period_s: polling interval in seconds.
        on_left: called with the `ClientAnswer` of each request whose client has disconnected.

    Raises RuntimeError if this project's package is not installed.
    """
    try:
        from triton_repo.cpu_executor.llmapi.upstream_watch import UpstreamWatch  # noqa: PLC0415
    except ModuleNotFoundError as missing:
        raise RuntimeError(
            "model.yaml: triton_config.polls_ended_requests: found true; allowed: false, as "
            f"{missing.name} is not installed here. It is for tests on the CPU: leave it out"
        ) from missing
    return UpstreamWatch(period_s, on_left)

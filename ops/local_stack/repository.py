"""Preparation of a model's engine folder and model repository for Triton."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

from adapters.config_json import ConfigError, read_config
from adapters.engine_config import engine_config, is_trtllm_checkpoint
from adapters.file_kinds import describe_gguf
from adapters.model_files import tokenizer_problems, weight_problems
from ops.local_stack.errors import StackError

REPOSITORY = "repository"
MAX_BATCH_SIZE = 64
MAX_BEAM_WIDTH = 4
# Size of the KV cache in tokens, which takes less than 400 MB of memory. 64 requests of maximum
# length do not fit at once: they would need twice this size.
MAX_KV_CACHE_TOKENS = "65536"

# Parameters of the repository. Instance counts are 1, because each instance is a process of about
# 100 MB. On bigger machines --parameter can raise the counts.
PARAMETERS = {
    "triton_backend": "python",
    "triton_max_batch_size": str(MAX_BATCH_SIZE),
    "decoupled_mode": "true",
    "enable_kv_cache_reuse": "true",
    "batching_strategy": "inflight_fused_batching",
    "logits_datatype": "TYPE_FP32",
    "encoder_input_features_data_type": "TYPE_FP16",
    "max_queue_delay_microseconds": "0",
    "preprocessing_instance_count": "1",
    "postprocessing_instance_count": "1",
    "bls_instance_count": "1",
    "guided_decoding_backend": "xgrammar",
}
# Additional parameters for engines that `prepare` builds. They are not set for an engine that the
# user provides, because its limits may be lower.
BUILT_HERE = {
    "max_beam_width": str(MAX_BEAM_WIDTH),
    "max_tokens_in_paged_kv_cache": MAX_KV_CACHE_TOKENS,
}


def link(repository: Path, state_dir: Path) -> None:
    """Replace `repository/` in `state_dir` with a link to an existing repository."""
    clear(state_dir / REPOSITORY)
    (state_dir / REPOSITORY).symlink_to(repository.absolute())


def prepare(model: Path, state_dir: Path, parameters: Mapping[str, str]) -> None:
    """Write the CPU executor's engine and the model repository into `state_dir`.

    Earlier folders `engine/` and `repository/` are removed first.

    Args:
        model: a Hugging Face folder of a Llama or GPT-2, or an engine folder with the tokenizer's
            files. An engine folder is used where it is, without a copy in `engine/`.
        state_dir: an existing folder.
        parameters: template parameters, which override `PARAMETERS`.

    Raises StackError if a file is missing or wrong.
    """
    require_files(model)
    # Import numpy and tokenizer tables after the checks, so that failing checks are fast.
    from triton_repo.cpu_executor import engine  # noqa: PLC0415
    from triton_repo.render import RenderError, render  # noqa: PLC0415

    repository, engine_dir = state_dir / REPOSITORY, state_dir / "engine"
    for folder in (repository, engine_dir):
        clear(folder)
    try:
        if read_config(model).is_engine:
            engine_dir, own = model, {}
        else:
            own = BUILT_HERE
            engine.build(
                model,
                engine_dir,
                max_batch_size=MAX_BATCH_SIZE,
                max_beam_width=MAX_BEAM_WIDTH,
                lora_target_modules=engine.lora_modules(model),
                # Let the engine return logits. This does not slow requests without logits.
                gather_context_logits=True,
                gather_generation_logits=True,
            )
        places = {"engine_dir": str(engine_dir.absolute()), "tokenizer_dir": str(model.absolute())}
        render(repository, PARAMETERS | own | places | dict(parameters))
    except (RenderError, ValueError) as error:
        raise StackError(f"the model repository of {model} cannot be made: {error}") from error


def require_files(model: Path) -> None:
    """Raise StackError if a file in the model's folder is missing or unusable."""
    for needed in ("config.json", "tokenizer.json"):
        if not (model / needed).exists():
            instead = describe_gguf(model, ", and ")
            raise StackError(f"--model: {model}/{needed} does not exist{instead}")
    problems = [str(problem) for problem in tokenizer_problems(model)]
    try:
        fields = read_config(model)
        if is_trtllm_checkpoint(fields):
            engine_config(fields)
        elif not fields.is_engine:
            problems += map(str, weight_problems(model))
    except ConfigError as error:
        problems.append(str(error))
    if problems:
        raise StackError("\n".join(f"--model: {problem}" for problem in problems))


def clear(folder: Path) -> None:
    """Remove a folder. If `folder` is a link, remove only the link."""
    if folder.is_symlink():
        folder.unlink()
    shutil.rmtree(folder, ignore_errors=True)

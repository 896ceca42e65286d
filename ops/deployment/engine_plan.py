"""Engine plans: the commands that build a TensorRT-LLM engine, and the memory it will need.

The commands are `convert_checkpoint.py` and `trtllm-build`. `ops.deployment.release` describes the
differences between releases.

See decision 096 in docs/decisions.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ops.deployment.checkpoint import Checkpoint
from ops.deployment.gpus import GPUS, Gpu
from ops.deployment.intent import Intent, problems
from ops.deployment.memory import (
    MemoryPlan,
    largest_request,
    parameter_count,
    plan_memory,
)
from ops.deployment.release import (
    KV_CACHE_TYPE,
    MAX_SEQ_LEN,
    MODEL_FOLDERS,
    NEWEST,
    Release,
)

DEFAULT_EXAMPLES = Path("/app/tensorrt_llm/examples")  # in NVIDIA's Triton containers
TOKENIZER_INFO = "xgrammar_tokenizer_info.json"
_MAX_TP = 8  # GPUs that share one NVLink domain in common hosts


class PlanError(ValueError):
    """Model, release and options contradict each other. The message has a line per problem."""


@dataclass(frozen=True, slots=True)
class Step:
    """A command of an engine plan, such as `trtllm-build`.

    `arguments` is the complete command line, which begins with the program. `needs` are the scripts
    and programs that must be installed to run the command.
    """

    name: str
    arguments: tuple[str, ...]
    needs: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePlan:
    """Instructions for building one engine.

    Attributes:
        intent: the properties that the engine must have.
        release: the TensorRT-LLM release that builds and serves; None if no engine is built.
        steps: the commands, in the order to run them.
        engine_dir: folder that the engine will be written to.
        tokenizer_info: file for guided decoding that the last step writes; None if the plan has no
            such step.
        advice: option changes that would make the engine fit the GPU; empty if it fits.
    """

    checkpoint: Checkpoint
    intent: Intent
    release: Release | None
    steps: tuple[Step, ...]
    engine_dir: Path
    tokenizer_info: Path | None
    memory: MemoryPlan
    advice: tuple[str, ...]

    def json(self) -> dict[str, Any]:
        """Return the plan as JSON values. Paths are text; sizes are bytes on one GPU."""
        fits = self.memory.fits(self.intent)
        return {
            "model": asdict(self.checkpoint) | {"folder": str(self.checkpoint.folder)},
            "parameters": parameter_count(self.checkpoint),
            "intent": asdict(self.intent),
            "trtllm_version": str(self.release),
            "steps": [{"name": step.name, "arguments": step.arguments} for step in self.steps],
            "engine_dir": str(self.engine_dir),
            "memory": asdict(self.memory) | {"fits": fits},
            "template_parameters": template_parameters(self),
            "advice": self.advice,
        }


def make_plan(
    checkpoint: Checkpoint,
    intent: Intent,
    release: Release | None,
    *,
    gpu: Gpu | None,
    folder: Path,
    examples: Path = DEFAULT_EXAMPLES,
) -> EnginePlan:
    """Return the plan for an engine in `folder`/engine.

    Args:
        checkpoint: the Hugging Face model.
        intent: the properties that the engine must have.
        release: the TensorRT-LLM release. None plans only the memory, without commands.
        gpu: the GPU of each rank. None if unknown; the plan then has no KV cache size.
        folder: folder for all output files.
        examples: the folder `examples` of TensorRT-LLM's source.

    Raises PlanError if model, release and intent contradict each other.
    """
    if found := problems(checkpoint, intent, release):
        raise PlanError("\n".join(found))
    steps = []
    if release is not None:
        steps.append(_convert(checkpoint, intent, release, folder, examples))
        steps.append(_build(intent, release, folder))
    info = folder / "tokenizer_info"
    if intent.guided_decoding:
        steps.append(_tokenizer_info(checkpoint, info, examples))
    memory = plan_memory(checkpoint, intent, gpu)
    return EnginePlan(
        checkpoint=checkpoint,
        intent=intent,
        release=release,
        steps=tuple(steps),
        engine_dir=folder / "engine",
        tokenizer_info=info / TOKENIZER_INFO if intent.guided_decoding else None,
        memory=memory,
        advice=tuple(_advice(checkpoint, intent, memory)),
    )


def template_parameters(plan: EnginePlan) -> dict[str, int | float | bool]:
    """Return the parameters of the model `tensorrt_llm` for this engine and its memory."""
    lora, kv = plan.memory.lora, plan.memory.kv_cache
    found: dict[str, int | float | bool] = {"max_beam_width": plan.intent.max_beam_width}
    if plan.intent.max_num_tokens < plan.intent.max_input_len:
        # Enable chunked context: without it, a prompt above max_num_tokens could never be
        # scheduled.
        found["enable_chunked_context"] = True
    if kv is not None:
        found["kv_cache_free_gpu_mem_fraction"] = kv.fraction
    if lora is not None:
        found["lora_cache_optimal_adapter_size"] = lora.optimal_adapter_size
        found["lora_cache_max_adapter_size"] = lora.max_adapter_size
        found["lora_cache_host_memory_bytes"] = lora.bytes
        if kv is not None and kv.lora_fraction is not None:
            found["lora_cache_gpu_memory_fraction"] = kv.lora_fraction
    return found


def _convert(
    checkpoint: Checkpoint, intent: Intent, release: Release, folder: Path, examples: Path
) -> Step:
    kind = checkpoint.kind
    models = "models/core" if release >= MODEL_FOLDERS else "."
    script = str(examples / models / kind.folder / "convert_checkpoint.py")
    source, target = str(checkpoint.folder.absolute()), str(folder / "checkpoint")
    if kind.gemma_options:
        options = [
            *("--ckpt-type", "hf", "--model-dir", source, "--output-model-dir", target),
            *("--dtype", intent.dtype, "--world-size", str(intent.tp)),
        ]
    else:
        options = ["--model_dir", source, "--output_dir", target, "--dtype", intent.dtype]
        options += ["--tp_size", str(intent.tp)]
        if kind.pipeline:
            options += ["--pp_size", str(intent.pp)]
    return Step("convert", ("python3", script, *options), ("python3", script))


def _build(intent: Intent, release: Release, folder: Path) -> Step:
    if release >= MAX_SEQ_LEN:
        length = ("--max_seq_len", str(intent.max_seq_len))
    else:
        length = ("--max_output_len", str(intent.max_seq_len - intent.max_input_len))
    paged = (
        ("--kv_cache_type", "paged") if release >= KV_CACHE_TYPE else ("--paged_kv_cache", "enable")
    )
    options = [
        *("--checkpoint_dir", str(folder / "checkpoint"), "--output_dir", str(folder / "engine")),
        *("--gemm_plugin", intent.dtype, "--gpt_attention_plugin", intent.dtype),
        *("--max_batch_size", str(intent.max_batch_size)),
        *("--max_input_len", str(intent.max_input_len), *length),
        *("--max_num_tokens", str(intent.max_num_tokens)),
        *("--max_beam_width", str(intent.max_beam_width)),
        *(*paged, "--remove_input_padding", "enable"),
        # Enable paged context FMHA, which KV cache reuse and chunked context both need.
        *("--context_fmha", "enable", "--use_paged_context_fmha", "enable"),
    ]
    if intent.lora_modules:
        options += ["--lora_plugin", intent.dtype, "--lora_target_modules", *intent.lora_modules]
        options += ["--max_lora_rank", str(intent.max_lora_rank)]
    if intent.gather_context_logits:
        options.append("--gather_context_logits")
    if intent.gather_generation_logits:
        options.append("--gather_generation_logits")
    if (ranks := intent.tp * intent.pp) > 1:
        options += ["--workers", str(ranks)]
    return Step("build", ("trtllm-build", *options), ("trtllm-build",))


def _tokenizer_info(checkpoint: Checkpoint, folder: Path, examples: Path) -> Step:
    script = str(examples / "generate_xgrammar_tokenizer_info.py")
    options = ("--model_dir", str(checkpoint.folder.absolute()), "--output_dir", str(folder))
    return Step("tokenizer info", ("python3", script, *options), ("python3", script))


def _advice(checkpoint: Checkpoint, intent: Intent, memory: MemoryPlan) -> Iterator[str]:
    """Yield changes of options, each of which alone would make the engine fit the GPU.

    If the weights alone exceed the GPU, first yield a notice. Yield nothing if the engine fits, or
    the GPU is unknown.
    """
    if memory.gpu is None or memory.fits(intent):
        return
    if memory.weights > memory.gpu.memory:
        yield "the weights alone are larger than the GPU"
    for tp in range(intent.tp + 1, _MAX_TP + 1):
        if _works(checkpoint, replace(intent, tp=tp), memory.gpu):
            yield f"--tp {tp}: {tp * intent.pp} GPUs of this kind"
            break
    larger = sorted(GPUS.values(), key=lambda gpu: gpu.memory)
    if names := [gpu.name for gpu in larger if _works(checkpoint, intent, gpu)]:
        yield f"--gpu {' or '.join(names)}"
    tokens = 0 if memory.kv_cache is None else memory.kv_cache.tokens
    shorter = max(1, min(intent.max_seq_len, tokens // intent.max_beam_width))
    for option, changed in (
        (f"--max-seq-len {shorter}, the prompt within it", _shorter(intent, shorter)),
        ("--max-num-tokens 2048", replace(intent, max_num_tokens=2048)),
        ("--max-batch-size 8", replace(intent, max_batch_size=8)),
        ("no --gather-context-logits", replace(intent, gather_context_logits=False)),
        ("--lora-adapters 1", replace(intent, lora_adapters=1)),
        ("--max-lora-rank 8", replace(intent, max_lora_rank=8)),
    ):
        if changed != intent and _works(checkpoint, changed, memory.gpu):
            yield option


def _shorter(intent: Intent, max_seq_len: int) -> Intent:
    prompt = min(intent.max_input_len, max_seq_len)
    return replace(intent, max_seq_len=max_seq_len, max_input_len=prompt)


def _works(checkpoint: Checkpoint, intent: Intent, gpu: Gpu) -> bool:
    """Return True if the model allows `intent` and the engine fits the GPU.

    The limits of the newest release are used. Memory sizes do not depend on the release.
    """
    if problems(checkpoint, intent, NEWEST):
        return False
    return bool(plan_memory(checkpoint, intent, gpu).fits(intent))


def shell_lines(step: Step) -> str:
    """Return the step's command in shell syntax, with one option per line."""
    lines: list[list[str]] = [[]]
    for argument in step.arguments:
        if argument.startswith("--"):
            lines.append([])
        lines[-1].append(shlex.quote(argument))
    return " \\\n    ".join(" ".join(line) for line in lines)


def requests_at_once(plan: EnginePlan) -> int | None:
    """Return the number of requests of maximum size that fit in the KV cache; None if unknown."""
    kv = plan.memory.kv_cache
    return None if kv is None else kv.tokens // largest_request(plan.intent)

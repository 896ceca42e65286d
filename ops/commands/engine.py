"""`gateway engine plan`: plans the engine of a Hugging Face model, and builds it if requested."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ops.deployment.checkpoint import Checkpoint
    from ops.deployment.engine_plan import EnginePlan
    from ops.deployment.intent import Intent

DEFAULT_VERSION = "0.17.0"
_GB = 1e9


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Plans and builds TensorRT-LLM engines."
    commands = parser.add_subparsers(dest="engine_command", required=True, metavar="COMMAND")
    plan = commands.add_parser(
        "plan",
        allow_abbrev=False,
        help="commands and memory of an engine",
        description="Prints the commands that build an engine of a Hugging Face model, and the "
        "memory that it will need. Exit code 1 when that is refused or does not fit the GPU, 2 "
        "for a release that has no such commands any more.",
    )
    add_plan_arguments(plan)
    plan.add_argument(
        "--output",
        type=Path,
        default=Path(),
        metavar="DIR",
        help="where checkpoint and engine are made (default: here)",
    )
    plan.add_argument("--json", action="store_true", help="the plan as JSON")
    plan.add_argument(
        "--run",
        action="store_true",
        dest="run_steps",
        help="run the commands, where TensorRT-LLM is installed",
    )


def add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the model's folder and the options of an engine plan to `parser`."""
    parser.add_argument("model", type=Path, metavar="HF_DIR", help="needs its config.json only")
    parser.add_argument(
        "--dtype",
        choices=("float16", "bfloat16"),
        help="of weights, KV cache and adapters (default: that of the weights, else float16)",
    )
    for name, default, text in (
        ("tp", 1, "GPUs that share each layer"),
        ("pp", 1, "GPUs that have different layers"),
        ("max-lora-rank", 64, "largest rank of an adapter"),
        ("lora-adapters", 8, "adapters that the caches are to hold at once"),
        ("max-batch-size", 64, "requests that run at once"),
        ("max-num-tokens", 8192, "tokens of all requests in one step"),
        ("max-beam-width", 1, "widest beam search"),
    ):
        help_text = f"{text} (default: {default})"
        parser.add_argument(f"--{name}", type=_count, default=default, metavar="N", help=help_text)
    parser.add_argument(
        "--max-seq-len",
        type=_count,
        metavar="N",
        help="tokens of prompt and output (default: the model's limit, at most 8192)",
    )
    parser.add_argument(
        "--max-input-len",
        type=_count,
        metavar="N",
        help="tokens of a prompt (default: max-seq-len)",
    )
    parser.add_argument(
        "--lora-modules",
        nargs="+",
        default=[],
        metavar="NAME",
        help="serve adapters on these: q_proj or attn_q and so on, or all",
    )
    for name, text in (
        ("gather-context-logits", "for log probabilities of an echoed prompt"),
        ("gather-generation-logits", "for alternatives (top_logprobs)"),
        ("guided-decoding", "enforce JSON schemas and grammars"),
    ):
        parser.add_argument(f"--{name}", action="store_true", help=text)
    parser.add_argument(
        "--trtllm-version",
        metavar="VERSION",
        help="the release that builds and serves, or the tag of Triton's container, such as 25.08 "
        f"(default: {DEFAULT_VERSION})",
    )
    parser.add_argument("--gpu", metavar="NAME", help="such as H100 or A100-80; checks the memory")
    parser.add_argument(
        "--trtllm-examples",
        type=Path,
        metavar="DIR",
        help="`examples` of TensorRT-LLM's source (default: where NVIDIA's containers have it)",
    )


def run(parsed: argparse.Namespace) -> int:
    """Run the command and return its exit code, which `add_arguments` documents."""
    from ops.deployment.engine_build import BuildError, build
    from ops.deployment.engine_plan import PlanError
    from ops.deployment.release import ReleaseError, ToolsRemoved

    try:
        plan = read_plan(parsed, parsed.output)
        if parsed.json:
            print(json.dumps(plan.json(), indent=2), flush=True)
        else:
            show(plan)
        fits = plan.memory.fits(plan.intent)
        if parsed.run_steps and fits is not False:
            return build(plan)
    except ToolsRemoved as error:
        print(f"gateway engine plan: {error}", file=sys.stderr)
        return 2
    except (ReleaseError, PlanError, BuildError, ValueError) as error:
        for line in str(error).splitlines():
            print(f"gateway engine plan: {line}", file=sys.stderr)
        return 1
    if fits is False and parsed.run_steps:
        print("gateway engine plan: nothing was run; leave --gpu out to try", file=sys.stderr)
    return int(fits is False)


def read_plan(parsed: argparse.Namespace, folder: Path, *, builds: bool = True) -> EnginePlan:
    """Return the plan of the engine that the options of `add_plan_arguments` describe.

    Args:
        parsed: the options.
        folder: folder for the checkpoint and the engine.
        builds: True if an engine will be built. False returns a plan without commands, for which
            no TensorRT-LLM release is needed.

    Raises:
        ToolsRemoved: the release has no commands that build engines.
        ValueError: the model or an option is unsuitable.
    """
    from ops.deployment.checkpoint import read_checkpoint
    from ops.deployment.engine_plan import DEFAULT_EXAMPLES, make_plan
    from ops.deployment.gpus import find_gpu
    from ops.deployment.release import parse_release

    release = parse_release(parsed.trtllm_version or DEFAULT_VERSION) if builds else None
    checkpoint = read_checkpoint(parsed.model)
    return make_plan(
        checkpoint,
        read_intent(parsed, checkpoint),
        release,
        gpu=None if parsed.gpu is None else find_gpu(parsed.gpu),
        folder=folder.absolute(),
        examples=parsed.trtllm_examples or DEFAULT_EXAMPLES,
    )


def read_intent(parsed: argparse.Namespace, checkpoint: Checkpoint) -> Intent:
    """Return the properties that the engine must have, such as its data type and maximum lengths.

    If the data type or a length is not given as an option, it is derived from the model's
    config.json.

    Raises ValueError for unknown LoRA modules.
    """
    from ops.deployment.intent import DEFAULT_MAX_SEQ_LEN, Intent, base_model, default_dtype
    from ops.deployment.lora_modules import engine_modules

    max_seq_len = parsed.max_seq_len or min(checkpoint.max_position_embeddings, DEFAULT_MAX_SEQ_LEN)
    intent = Intent(
        dtype=parsed.dtype or default_dtype(checkpoint),
        tp=parsed.tp,
        pp=parsed.pp,
        max_lora_rank=parsed.max_lora_rank,
        lora_adapters=parsed.lora_adapters,
        max_batch_size=parsed.max_batch_size,
        max_input_len=parsed.max_input_len or max_seq_len,
        max_seq_len=max_seq_len,
        max_num_tokens=parsed.max_num_tokens,
        max_beam_width=parsed.max_beam_width,
        gather_context_logits=parsed.gather_context_logits,
        gather_generation_logits=parsed.gather_generation_logits,
        guided_decoding=parsed.guided_decoding,
    )
    if not parsed.lora_modules:
        return intent
    modules = engine_modules(parsed.lora_modules, base_model(checkpoint, intent))
    return replace(intent, lora_modules=modules)


def show(plan: EnginePlan) -> None:
    """Print the plan as text: the build commands, the GPU memory table, and Triton's parameters.

    The parameters are those of the model `tensorrt_llm` in the model repository.
    """
    from ops.deployment.engine_plan import shell_lines, template_parameters

    for step in plan.steps:
        print(f"# {step.name}")
        print(shell_lines(step))
        print()
    show_memory(plan)
    print()
    print("# parameters of the tensorrt_llm model")
    for name, value in template_parameters(plan).items():
        print(f"{name}:{json.dumps(value)}")


def show_memory(plan: EnginePlan) -> None:
    """Print the table of GPU memory. If the engine does not fit, print what to change."""
    from ops.deployment.engine_plan import requests_at_once
    from ops.deployment.memory import largest_request, parameter_count

    memory, intent = plan.memory, plan.intent
    ranks = intent.tp * intent.pp
    print(
        f"# memory of each GPU ({ranks} in all; {parameter_count(plan.checkpoint):,} weights; "
        "1 GB is 10^9 bytes)"
    )
    _row("weights", memory.weights)
    _row("workspace (estimate)", memory.workspace)
    if memory.lora is not None:
        size = f"{memory.lora.adapters} adapters of rank {intent.max_lora_rank}"
        _row("LoRA cache", memory.lora.bytes, f"{size}; the same on the host")
    print(f"{'KV cache per token':<22}{memory.kv_bytes_per_token:>14,} bytes")
    longest = largest_request(intent)
    if memory.gpu is None:
        _row("largest request", longest * memory.kv_bytes_per_token, f"{longest:,} tokens")
        print("name a GPU with --gpu to see what fits")
        return
    _row(memory.gpu.name, memory.gpu.memory)
    if (kv := memory.kv_cache) is not None:
        text = f"{kv.tokens:,} tokens: {requests_at_once(plan)} of the largest requests at once"
        _row("KV cache", kv.bytes, text)
    if memory.fits(intent):
        print("fits")
        return
    print(f"does not fit: the largest request is {longest:,} tokens")
    for line in plan.advice:
        print(f"  would fit with {line}" if line.startswith(("-", "no ")) else f"  {line}")


def _row(name: str, size: int, text: str = "") -> None:
    print(f"{name:<22}{size / _GB:>11.2f} GB  {text}".rstrip())


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"found {text!r}, allowed: an integer of at least 1")
    return int(text)

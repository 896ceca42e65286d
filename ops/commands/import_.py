"""`gateway import`: prepares a Hugging Face model: engine plan, model repository and settings."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ops.commands.engine import DEFAULT_VERSION, add_plan_arguments, read_plan, show_memory
from ops.deployment.launch import CORE_MODEL

if TYPE_CHECKING:
    from ops.deployment.engine_plan import EnginePlan
    from ops.deployment.importing import ImportedModel


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Plans the engine of a Hugging Face model, renders the model repository for Triton and "
        "writes the gateway's settings, all into one folder; says what is left to do. Exit code "
        "1 when that is refused or does not fit the GPU, 2 for a release that builds no engines."
    )
    add_plan_arguments(parser)
    parser.add_argument(
        "--name", required=True, metavar="NAME", help="the model's name for clients"
    )
    parser.add_argument(
        "--triton-name",
        default=CORE_MODEL,
        metavar="NAME",
        help="the name in Triton of the model that runs the engine (default: %(default)s)",
    )
    parser.add_argument(
        "--output", type=Path, metavar="DIR", help="default: the last part of NAME, here"
    )
    parser.add_argument(
        "--cpu",
        action="store_true",
        help="make an engine for the CPU executor, which can be served at once",
    )
    parser.add_argument(
        "--llmapi",
        action="store_true",
        help="no engine: the llmapi repository, in which TensorRT-LLM's LLM API serves the folder "
        "itself (releases since 1.2); with --cpu over the CPU executor",
    )


def run(parsed: argparse.Namespace) -> int:
    """Run the command and return its exit code, which `add_arguments` documents."""
    from ops.deployment.importing import import_for_cpu, import_for_gpu, import_llmapi
    from ops.deployment.release import ToolsRemoved

    if parsed.cpu:
        from ops.local_stack.binaries import require_cpu_executor
        from ops.local_stack.errors import StackError

        try:
            require_cpu_executor()
        except StackError as error:
            print(f"gateway import: --cpu: {error}", file=sys.stderr)
            return 1
    folder: Path = parsed.output or Path(parsed.name.rpartition("/")[2])
    try:
        if parsed.llmapi:
            _refuse_with_llmapi(parsed)
        if parsed.cpu:
            _refuse_with_cpu(parsed)
        plan = read_plan(parsed, folder, builds=not parsed.llmapi)
        if plan.memory.fits(plan.intent) is False:
            show_memory(plan)
            return 1
        if parsed.llmapi:
            named = (parsed.name, folder, parsed.triton_name)
            imported = import_llmapi(plan, *named, on_cpu=parsed.cpu)
        else:
            make = import_for_cpu if parsed.cpu else import_for_gpu
            release = parsed.trtllm_version or DEFAULT_VERSION
            imported = make(plan, parsed.name, folder, release, parsed.triton_name)
    except ToolsRemoved as error:
        print(f"gateway import: {error}", file=sys.stderr)
        return 2
    # Print only the text of the error. The text of an OSError includes the path of the file.
    except (ValueError, OSError) as error:
        for line in str(error).splitlines():
            print(f"gateway import: {line}", file=sys.stderr)
        return 1
    _show(plan, imported, folder, parsed)
    return 0


def _refuse_with_llmapi(parsed: argparse.Namespace) -> None:
    """Raise ValueError for options that are not allowed with --llmapi.

    No engine is built, so options of an engine build are not allowed. Neither are options for which
    the llmapi repository's model has no input.
    """
    problems = {
        "--trtllm-version, --trtllm-examples: not with --llmapi, which builds no engine": (
            parsed.trtllm_version is not None or parsed.trtllm_examples is not None
        ),
        "--max-input-len: not with --llmapi, whose prompts may be as long as --max-seq-len": (
            parsed.max_input_len is not None
        ),
        "--max-beam-width, --guided-decoding, --gather-context-logits, "
        "--gather-generation-logits: not with --llmapi, whose model has no input for them": (
            parsed.max_beam_width > 1
            or parsed.guided_decoding
            or parsed.gather_context_logits
            or parsed.gather_generation_logits
        ),
    }
    if found := [text for text, is_wrong in problems.items() if is_wrong]:
        raise ValueError("\n".join(found))


def _refuse_with_cpu(parsed: argparse.Namespace) -> None:
    """Raise ValueError for options of a TensorRT-LLM build, which are not allowed with --cpu.

    If no such option is given, set `parsed.trtllm_version` to the newest release. The release
    selects the templates of the model repository.
    """
    from ops.deployment.release import NEWEST

    for option in ("gpu", "trtllm_version", "trtllm_examples"):
        if getattr(parsed, option) is not None:
            name = option.replace("_", "-")
            raise ValueError(f"--{name}: not with --cpu, which builds without TensorRT-LLM")
    parsed.trtllm_version = str(NEWEST)


def _show(
    plan: EnginePlan, imported: ImportedModel, folder: Path, parsed: argparse.Namespace
) -> None:
    where = shlex.quote(str(folder))
    print(f"{imported.name} is in {where}: {', '.join(_list_outputs(folder))}")
    print()
    if parsed.cpu:
        print("Serve it:")
        print(f"  gateway up --imported {where}")
        return
    show_memory(plan)
    print()
    if not parsed.llmapi:
        _show_names(parsed.trtllm_version or DEFAULT_VERSION)
    ranks = 1 if parsed.llmapi else plan.intent.tp * plan.intent.pp
    steps = [
        ("Build the engine, where TensorRT-LLM is installed:", f"{where}/build_engine.sh"),
        ("Look over the result:", f"gateway repo check {where}/repository"),
        (
            "Start Triton; in a container mount both folders under the same paths:",
            f"gateway triton launch --model-repo {where}/repository"
            + (f" --world-size {ranks}" if ranks > 1 else "")
            + _for_launch(imported.own_triton_name),
        ),
        ("Start the gateway:", f"set -a; . {where}/gateway.env; gateway serve"),
    ]
    if parsed.llmapi:
        del steps[0]
    for number, (text, command) in enumerate(steps, 1):
        print(f"{number}. {text}")
        print(f"   {command}")


def _for_launch(triton_name: str | None) -> str:
    return "" if triton_name is None else f" --tensorrt-llm-model-name {triton_name}"


def _show_names(release: str) -> None:
    """Print a note if a release has other input names in Triton's container than in its git tag.

    This is true only for TensorRT-LLM 0.19.
    """
    from ops.deployment.release import read_sets

    if len(read_sets(release)) > 1:
        print(
            f"TensorRT-LLM {release} reads seed and min_tokens in container 25.05, random_seed and "
            "min_length in upstream's tag v0.19.0.\nThe repository is that of the tag. If the "
            "container serves it, import with --trtllm-version 25.05.\n"
        )


def _list_outputs(folder: Path) -> list[str]:
    return sorted(path.name + "/" * path.is_dir() for path in folder.iterdir())

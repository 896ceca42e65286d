"""`gateway triton launch`: runs tritonserver with TensorRT-LLM, on one machine or with Slurm."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ops.deployment.launch import Launch
    from ops.deployment.slurm import Job


_SLURM_OPTIONS = (
    ("--nodes", "N", "default: 1"),
    ("--gpus-per-node", "N", "ranks of each node (default: 8)"),
    ("--partition", "NAME", None),
    ("--account", "NAME", None),
    ("--time", "LIMIT", "such as 1-00:00:00"),
    ("--container-image", "IMAGE", "for clusters with Pyxis"),
    ("--container-mounts", "MOUNTS", "FROM:TO,FROM:TO for the container"),
    ("--job-name", "NAME", "default: triton"),
    ("--output", "DIR", "for scripts and logs, seen by all nodes (default: slurm)"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Runs Triton on a model repository of TensorRT-LLM."
    commands = parser.add_subparsers(dest="triton_command", required=True, metavar="COMMAND")
    text = "start it, or write the scripts for Slurm"
    _add_launch(commands.add_parser("launch", help=text, allow_abbrev=False))


def run(parsed: argparse.Namespace) -> int:
    """Run Triton until SIGINT or SIGTERM, or write the scripts for Slurm. Return the exit code."""
    from ops.deployment.launch import command, environment, shell_text
    from ops.deployment.launch_checks import (
        LaunchError,
        check,
        read_core_models,
        resolve_mode,
        warnings,
    )
    from ops.deployment.llmapi_yaml import LLM_CONFIG_PATH
    from ops.deployment.running import run_in_foreground
    from ops.deployment.slurm import compose_scripts, write_scripts

    try:
        launch = _launch(parsed)
        # With Slurm, do not read a repository that does not exist on this machine: it may be on a
        # file system that only the cluster's nodes mount.
        is_hidden = parsed.slurm and not Path(launch.model_repo).exists()
        llm_config = os.environ.get(LLM_CONFIG_PATH)
        models = [] if is_hidden else read_core_models(launch, llm_config)
        launch = resolve_mode(launch, models, is_llmapi=parsed.llmapi)
        check(launch, models)
        for text in warnings(launch):
            print(f"gateway triton launch: warning: {text}", file=sys.stderr)
        if parsed.slurm:
            scripts = compose_scripts(launch, _job(parsed))
            if parsed.dry_run:
                print(*(f"--- {path}\n{text}" for path, text in scripts.items()), sep="\n", end="")
            else:
                print(f"submit it with: sbatch {write_scripts(scripts)}")
            return 0
        if parsed.dry_run:
            print(shell_text(command(launch), environment(launch)))
            return 0
        return run_in_foreground(
            launch, find_server=parsed.tritonserver is None, force=parsed.force
        )
    except LaunchError as error:
        print(f"gateway triton launch: error:\n{error}", file=sys.stderr)
        return 2


def _add_launch(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Starts tritonserver as launch_triton_server.py of tensorrtllm_backend does, with the "
        "same arguments, but stays in the foreground: prints `ready: URL` when rank 0 serves, "
        "ends everything after SIGINT or SIGTERM, at once after a second one. A model of the "
        "llmapi repository starts the workers of its engine itself; with --world-size mpirun and "
        "trtllm-llmapi-launch start them, with --slurm srun does."
    )
    parser.add_argument("--model-repo", required=True, metavar="DIR")
    parser.add_argument(
        "--world-size",
        type=int,
        metavar="N",
        help="ranks of the engine (default: 1, which for llmapi means no MPI; with --slurm: all "
        "GPUs)",
    )
    parser.add_argument(
        "--llmapi",
        action="store_true",
        help="it is the llmapi repository: for --slurm, where it cannot be read from here",
    )
    parser.add_argument(
        "--tensorrt-llm-model-name",
        default="tensorrt_llm",
        metavar="NAME[,NAME]",
        help="the models that all ranks load (default: tensorrt_llm)",
    )
    parser.add_argument(
        "--tritonserver",
        metavar="PATH",
        help="default: the one on PATH, else that of the nvidia-pytriton wheel; where nothing is "
        "started, that of NVIDIA's containers",
    )
    for name, port in (("grpc", 8001), ("http", 8000), ("metrics", 8002)):
        parser.add_argument(
            f"--{name}-port",
            f"--{name}_port",
            type=_port,
            default=port,
            metavar="PORT",
            help=f"of rank 0 (default: {port})",
        )
    parser.add_argument(
        "--multi-model",
        action="store_true",
        help="orchestrator mode: several engines, whose workers tritonserver starts",
    )
    parser.add_argument(
        "--disable-spawn-processes",
        action="store_true",
        help="with --multi-model: the workers are ranks 1 and up of this launch",
    )
    parser.add_argument(
        "--multimodal-gpu0-cuda-mem-pool-bytes",
        type=int,
        default=0,
        metavar="BYTES",
        help="CUDA memory pool of rank 0 on GPU 0",
    )
    parser.add_argument("--oversubscribe", action="store_true", help="passed to mpirun")
    parser.add_argument("--no-mpi", action="store_true", help="start the one rank without mpirun")
    parser.add_argument("--log", action="store_true", help="rank 0 logs verbosely to --log-file")
    parser.add_argument("--log-file", metavar="FILE", help="default: triton_log.txt")
    parser.add_argument(
        "--exit-timeout",
        type=int,
        metavar="SECONDS",
        help="what running requests get at the end (default: Triton's, 30)",
    )
    parser.add_argument(
        "--release",
        choices=("v0.17", "v0.19"),
        default="v0.17",
        help="whose order of arguments (default: v0.17)",
    )
    parser.add_argument(
        "--force", "-f", action="store_true", help="start even if a tritonserver runs here"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="check, print the command and start nothing"
    )
    parser.add_argument(
        "--triton-argument",
        action="append",
        default=[],
        metavar="ARGUMENT",
        help="a further argument of tritonserver, for all ranks; may be repeated: "
        "--triton-argument=--http-address=127.0.0.1",
    )
    slurm = parser.add_argument_group(
        "Slurm", "Writes the scripts for an engine on several nodes instead of starting it."
    )
    slurm.add_argument("--slurm", action="store_true")
    for option, metavar, text in _SLURM_OPTIONS:
        kind = int if metavar == "N" else str
        slurm.add_argument(option, type=kind, metavar=metavar, help=text)


def _launch(parsed: argparse.Namespace) -> Launch:
    from ops.deployment.launch import DEFAULT_EXECUTABLE, LOG_FILE, Launch, Mode, count_gpus
    from ops.deployment.launch_checks import LaunchError

    if problems := _without_effect(parsed):
        raise LaunchError("\n".join(problems))
    mode = Mode.LEADER
    if parsed.multi_model:
        mode = Mode.PRESPAWNED if parsed.disable_spawn_processes else Mode.SPAWN
    world_size = _job(parsed).world_size if parsed.slurm else 1
    if parsed.world_size is not None:
        if parsed.slurm and parsed.world_size != world_size:
            raise LaunchError(
                f"--world-size: found {parsed.world_size}, allowed {world_size}: as many as GPUs"
            )
        world_size = parsed.world_size
    return Launch(
        model_repo=parsed.model_repo,
        world_size=world_size,
        core_models=tuple(parsed.tensorrt_llm_model_name.split(",")),
        tritonserver=parsed.tritonserver or DEFAULT_EXECUTABLE,
        grpc_port=parsed.grpc_port,
        http_port=parsed.http_port,
        metrics_port=parsed.metrics_port,
        mode=mode,
        log_file=(parsed.log_file or LOG_FILE) if parsed.log else None,
        mpi=not parsed.no_mpi,
        oversubscribe=parsed.oversubscribe,
        multimodal_pool=parsed.multimodal_gpu0_cuda_mem_pool_bytes,
        gpus_without_pool=count_gpus(os.environ) if mode == Mode.SPAWN else None,
        exit_timeout=parsed.exit_timeout,
        release=parsed.release,
        more=tuple(parsed.triton_argument),
    )


def _job(parsed: argparse.Namespace) -> Job:
    from ops.deployment.slurm import Job

    given = {
        "nodes": parsed.nodes,
        "gpus_per_node": parsed.gpus_per_node,
        "name": parsed.job_name,
        "folder": parsed.output and Path(parsed.output),
    }
    return Job(
        **{name: value for name, value in given.items() if value is not None},
        partition=parsed.partition,
        account=parsed.account,
        time=parsed.time,
        container_image=parsed.container_image,
        container_mounts=parsed.container_mounts,
    )


def _without_effect(parsed: argparse.Namespace) -> list[str]:
    """Return an error message for each option that has no effect with the given options."""
    problems = {
        "--disable-spawn-processes: it needs --multi-model": parsed.disable_spawn_processes
        and not parsed.multi_model,
        "--log-file: it needs --log": parsed.log_file is not None and not parsed.log,
        "--no-mpi, --oversubscribe: with --slurm there is no mpirun": parsed.slurm
        and (parsed.no_mpi or parsed.oversubscribe),
    }
    for option, _, _ in _SLURM_OPTIONS:
        value = getattr(parsed, option.removeprefix("--").replace("-", "_"))
        problems[f"{option}: it needs --slurm"] = value is not None and not parsed.slurm
    return [text for text, is_wrong in problems.items() if is_wrong]


def _port(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) <= 65_535:
        raise argparse.ArgumentTypeError(f"found {text!r}, allowed 1 to 65535")
    return int(text)

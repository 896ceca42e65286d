"""Scripts that start an engine's ranks on several nodes: one for sbatch, and one for each rank.

The scripts follow tensorrtllm_backend's guide for Slurm. srun starts the ranks with PMIx, so mpirun
is not needed. The variable SLURM_PROCID is the rank.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ops.deployment.launch import (
    LLMAPI_LAUNCH,
    Launch,
    Mode,
    shared_arguments,
    shm_argument,
)
from ops.deployment.launch_checks import LaunchError

BATCH_SCRIPT = "triton.sbatch"
RANK_SCRIPT = "rank.sh"
WORKERS_GRACE = 10  # seconds after which srun kills the other ranks once one has ended


@dataclass(frozen=True, kw_only=True)
class Job:
    """Options of a Slurm job. None selects the cluster's default.

    Attributes:
        gpus_per_node: number of GPUs of a node, which is also the number of its ranks.
        time: time limit in Slurm's format, such as 1-00:00:00.
        container_image: the image to run in, for clusters with Pyxis.
        container_mounts: the container's mounts, as FROM:TO,FROM:TO.
        folder: folder for the scripts and logs, which all nodes must be able to access.
    """

    nodes: int = 1
    gpus_per_node: int = 8
    name: str = "triton"
    partition: str | None = None
    account: str | None = None
    time: str | None = None
    container_image: str | None = None
    container_mounts: str | None = None
    folder: Path = Path("slurm")

    @property
    def world_size(self) -> int:
        return self.nodes * self.gpus_per_node


def compose_scripts(launch: Launch, job: Job) -> dict[Path, str]:
    """Return the texts of the scripts by path. The script for sbatch is the first.

    `launch.world_size` must equal `job.world_size`. Raises LaunchError if an option does not work
    with Slurm.
    """
    _check(launch, job)
    folder = job.folder.absolute()
    return {
        folder / BATCH_SCRIPT: _batch_script(job, folder),
        folder / RANK_SCRIPT: _rank_script(
            replace(launch, model_repo=str(Path(launch.model_repo).absolute()))
        ),
    }


def write_scripts(scripts: Mapping[Path, str]) -> Path:
    """Write the scripts and return the path for sbatch. Raises LaunchError if a write fails."""
    try:
        for path, text in scripts.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise LaunchError(f"--output: {error}") from error
    return next(iter(scripts))


def _check(launch: Launch, job: Job) -> None:
    values = [job.name, job.partition, job.account, job.time, str(job.folder.absolute())]
    problems = {
        "--multi-model: with --slurm only an engine in leader mode can be started; an "
        "orchestrator has no GPU, and you choose its node": (
            launch.mode not in (Mode.LEADER, Mode.LLMAPI)
        ),
        f"--nodes: found {job.nodes}, allowed 1 or more": job.nodes < 1,
        f"--gpus-per-node: found {job.gpus_per_node}, allowed 1 or more": job.gpus_per_node < 1,
        "--container-mounts: it needs --container-image": bool(job.container_mounts)
        and not job.container_image,
        "--job-name, --partition, --account, --time, --output: sbatch cannot read values with "
        "spaces, quotes, backslashes, # or %": any(
            value is not None and re.fullmatch(r"[^\s\"'\\#%]+", value) is None for value in values
        ),
    }
    if found := [text for text, is_wrong in problems.items() if is_wrong]:
        raise LaunchError("\n".join(found))


def _batch_script(job: Job, folder: Path) -> str:
    options = {
        "job-name": job.name,
        "nodes": str(job.nodes),
        "ntasks-per-node": str(job.gpus_per_node),
        "gpus-per-node": str(job.gpus_per_node),
        "partition": job.partition,
        "account": job.account,
        "time": job.time,
        "output": f"{folder}/%x_%j.out",
    }
    directives = "\n".join(f"#SBATCH --{name}={value}" for name, value in options.items() if value)
    # Leave out the options that bind GPUs to tasks: TensorRT-LLM needs to see all GPUs of the node,
    # and chooses the GPU of each rank itself.
    step = ["--mpi=pmix", "--kill-on-bad-exit=1", f"--wait={WORKERS_GRACE}"]
    if job.container_image:
        step.append(f"--container-image={job.container_image}")
        mounts = [job.container_mounts] if job.container_mounts else []
        step.append(f"--container-mounts={','.join([*mounts, f'{folder}:{folder}'])}")
    step += [f"--output={folder}/rank_%j_%t.log", "bash", f"{folder}/{RANK_SCRIPT}"]
    options_of_srun = _quote(step, " \\\n  ")
    return f"""#!/bin/bash
# Submit: sbatch {folder}/{BATCH_SCRIPT}
# Stop: scancel JOB. Rank 0 ends its requests, for as long as Slurm's KillWait lets it.
{directives}
set -euo pipefail
echo "Triton will listen on $(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"
srun {options_of_srun}
"""


def _llmapi_script(launch: Launch) -> str:
    arguments = _quote(shared_arguments(launch, is_leader=True), "\n  ")
    return f"""#!/bin/bash
# One rank of the LLM API; srun starts it. Rank 0 serves, the others are its engine's workers.
set -euo pipefail
if [[ ${{SLURM_PROCID:?this script is for srun}} != 0 ]]; then
  # The leader needs the other ranks until it has ended.
  trap '' TERM
fi
arguments=(
  {arguments}
)
exec {LLMAPI_LAUNCH} {shlex.quote(launch.tritonserver)} "${{arguments[@]}}" \\
  "{shm_argument("0")}"
"""


def _rank_script(launch: Launch) -> str:
    if launch.mode == Mode.LLMAPI:
        return _llmapi_script(launch)
    leader = _quote(shared_arguments(launch, is_leader=True), "\n      ")
    worker = _quote(shared_arguments(launch, is_leader=False), "\n      ")
    # Do not quote this argument, because the shell must replace the variable with the rank.
    shm = shm_argument("${SLURM_PROCID}")
    return f"""#!/bin/bash
# One rank of the engine; srun starts it. Rank 0 serves, the others load the engine alone.
set -euo pipefail
case "${{SLURM_PROCID:?this script is for srun}}" in
  0)
    arguments=(
      {leader}
    )
    ;;
  *)
    # The leader needs the other ranks until it has ended.
    trap '' TERM
    arguments=(
      {worker}
    )
    ;;
esac
exec {shlex.quote(launch.tritonserver)} "${{arguments[@]}}" \\
  "{shm}"
"""


def _quote(parts: Sequence[str], separator: str) -> str:
    return separator.join(shlex.quote(part) for part in parts)

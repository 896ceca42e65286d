"""Slurm scripts: checked by bash and shellcheck, and run with stand-ins for Slurm's commands."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ops.deployment.launch import Launch
from ops.deployment.launch_checks import LaunchError
from ops.deployment.slurm import Job, compose_scripts, write_scripts

# Stand-in for srun on one node: starts the ranks, each with its number, and waits.
SRUN = """#!/bin/bash
printf '%s\\n' "$@" > "$RECORDS/srun"
while [[ $1 == --* ]]; do shift; done
for ((rank = 0; rank < RANKS; rank++)); do
  SLURM_PROCID=$rank "$@" &
done
wait
"""
SCONTROL = '#!/bin/sh\nprintf "%s\\n" node7 node8\n'
TRITONSERVER = f"""#!{sys.executable}
import json, os, signal, sys
rank = os.environ["SLURM_PROCID"]
ignores = signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
with open(os.environ["RECORDS"] + "/rank" + rank, "w") as record:
    json.dump([sys.argv[1:], ignores], record)
"""


def _scripts(folder: Path, *arguments: str) -> tuple[Path, Path]:
    made = subprocess.run(
        [
            *(sys.executable, "-m", "ops", "triton", "launch", "--slurm"),
            *("--model-repo", "/only on the nodes/repository", "--output", str(folder)),
            *arguments,
        ],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    batch = folder / "triton.sbatch"
    assert made.stdout == f"submit it with: sbatch {batch}\n"
    return batch, folder / "rank.sh"


def test_both_scripts_run(tmp_path: Path) -> None:
    tools, records = tmp_path / "tools", tmp_path / "records"
    for folder in (tools, records):
        folder.mkdir()
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("tritonserver", TRITONSERVER)):
        (tools / name).write_text(text, encoding="utf-8")
        (tools / name).chmod(0o755)
    batch, rank = _scripts(
        tmp_path / "job",
        *("--nodes", "2", "--gpus-per-node", "2", "--log", "--log-file", "/logs/it's $HOME"),
        *("--tritonserver", str(tools / "tritonserver"), "--http-port", "9000"),
    )
    environ = os.environ | {"PATH": f"{tools}:{os.environ['PATH']}", "RECORDS": str(records)}
    environ |= {"SLURM_JOB_NODELIST": "node[7-8]", "RANKS": "4"}
    ran = subprocess.run(
        ["bash", batch], env=environ, capture_output=True, text=True, check=True, timeout=60
    )
    assert ran.stdout == "Triton will listen on node7\n"
    assert (records / "srun").read_text(encoding="utf-8").splitlines() == [
        *("--mpi=pmix", "--kill-on-bad-exit=1", "--wait=10"),
        f"--output={rank.parent}/rank_%j_%t.log",
        *("bash", str(rank)),
    ]
    common = ["--grpc-port=8001", "--http-port=9000", "--metrics-port=8002"]
    common.append("--disable-auto-complete-config")
    repository = "--model-repository=/only on the nodes/repository"
    leader = [repository, "--log-verbose=3", "--log-file=/logs/it's $HOME", *common]
    worker = [repository, "--model-control-mode=explicit", "--load-model=tensorrt_llm", *common]
    for number, arguments in enumerate([leader, worker, worker, worker]):
        record = json.loads((records / f"rank{number}").read_text(encoding="utf-8"))
        shm = f"--backend-config=python,shm-region-prefix-name=prefix{number}_"
        # Other ranks ignore SIGTERM: scancel signals all at once, and the leader's requests need
        # them.
        assert record == [[*arguments, shm], number > 0]


def test_ranks_of_the_llm_api_are_all_started_alike(tmp_path: Path) -> None:
    """Check that all ranks run TensorRT-LLM's launcher, which distinguishes the ranks."""
    tools, records = tmp_path / "tools", tmp_path / "records"
    for folder in (tools, records):
        folder.mkdir()
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (tools / name).write_text(text, encoding="utf-8")
    (tools / "trtllm-llmapi-launch").write_text(TRITONSERVER, encoding="utf-8")
    for tool in tools.iterdir():
        tool.chmod(0o755)
    batch, _ = _scripts(tmp_path / "job", "--llmapi", "--gpus-per-node", "2")
    environ = os.environ | {"PATH": f"{tools}:{os.environ['PATH']}", "RECORDS": str(records)}
    environ |= {"SLURM_JOB_NODELIST": "node[7-8]", "RANKS": "2"}
    subprocess.run(["bash", batch], env=environ, capture_output=True, check=True, timeout=60)
    server = [
        *("/opt/tritonserver/bin/tritonserver", "--model-repository=/only on the nodes/repository"),
        *("--grpc-port=8001", "--http-port=8000", "--metrics-port=8002"),
        "--disable-auto-complete-config",
        "--backend-config=python,shm-region-prefix-name=prefix0_",
    ]
    for number in range(2):
        record = json.loads((records / f"rank{number}").read_text(encoding="utf-8"))
        assert record == [server, number > 0]


def test_a_rank_is_started_by_srun_alone(tmp_path: Path) -> None:
    _, rank = _scripts(tmp_path)
    environ = {name: value for name, value in os.environ.items() if name != "SLURM_PROCID"}
    ran = subprocess.run(
        ["bash", rank], env=environ, capture_output=True, text=True, check=False, timeout=60
    )
    assert ran.returncode != 0
    assert "this script is for srun" in ran.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        [
            *("--container-image", "nvcr.io#nvidia/tritonserver:25.01", "--time", "1-00:00:00"),
            *("--container-mounts", "/data dir:/data", "--partition", "a", "--account", "b"),
        ],
        ["--llmapi"],
    ],
)
def test_shellcheck_finds_nothing(arguments: list[str], tmp_path: Path) -> None:
    shellcheck = Path(sys.executable).parent / "shellcheck"
    for script in _scripts(tmp_path, *arguments):
        checked = subprocess.run(
            [shellcheck, script],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert checked.returncode == 0, checked.stdout


def test_options_for_sbatch(tmp_path: Path) -> None:
    job = Job(
        nodes=2,
        gpus_per_node=4,
        name="llama",
        partition="gpu",
        account="me",
        time="30",
        container_image="registry#image:1",
        container_mounts="/data:/data",
        folder=tmp_path,
    )
    text, _ = compose_scripts(Launch(model_repo="/repo", world_size=8), job).values()
    assert [line for line in text.splitlines() if line.startswith("#SBATCH")] == [
        "#SBATCH --job-name=llama",
        "#SBATCH --nodes=2",
        "#SBATCH --ntasks-per-node=4",
        "#SBATCH --gpus-per-node=4",
        "#SBATCH --partition=gpu",
        "#SBATCH --account=me",
        "#SBATCH --time=30",
        f"#SBATCH --output={tmp_path}/%x_%j.out",
    ]
    assert "'--container-image=registry#image:1'" in text
    # The rank script's folder must be mounted in the container.
    assert f"--container-mounts=/data:/data,{tmp_path}:{tmp_path}" in text


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    scripts = compose_scripts(
        Launch(model_repo="/repo", world_size=8), Job(folder=tmp_path / "file")
    )
    with pytest.raises(LaunchError, match=f"--output: .*{tmp_path}/file"):
        write_scripts(scripts)


@pytest.mark.parametrize(
    ("job", "expected"),
    [
        (Job(nodes=0), "--nodes: found 0, allowed 1 or more"),
        (Job(gpus_per_node=0), "--gpus-per-node: found 0, allowed 1 or more"),
        (Job(container_mounts="/a:/a"), "--container-mounts: it needs --container-image"),
        (Job(name="two words"), "--job-name, --partition, --account, --time, --output: sbatch"),
        (Job(partition=""), "--job-name, --partition, --account, --time, --output: sbatch"),
        (Job(folder=Path("/a%b")), "--job-name, --partition, --account, --time, --output: sbatch"),
    ],
)
def test_what_slurm_cannot_do(job: Job, expected: str) -> None:
    with pytest.raises(LaunchError) as refused:
        compose_scripts(Launch(model_repo="/repo"), job)
    assert str(refused.value).startswith(expected)

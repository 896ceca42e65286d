"""Ranks of an MPI job: the leader executes requests, and the other ranks wait."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.triton_server import MODEL
from triton_repo.cpu_executor import bindings as trtllm
from triton_repo.cpu_executor import engine
from triton_repo.cpu_executor.ranks import own_rank


@pytest.mark.parametrize(
    ("environ", "rank"),
    [
        ({}, 0),
        ({"OMPI_COMM_WORLD_RANK": "3"}, 3),
        ({"PMIX_RANK": "2"}, 2),
        ({"SLURM_PROCID": "1"}, 1),
        # With mpirun inside a Slurm allocation, SLURM_PROCID is not the rank of the MPI job.
        ({"OMPI_COMM_WORLD_RANK": "1", "SLURM_PROCID": "0"}, 1),
    ],
)
def test_the_launcher_says_which_rank_this_is(environ: dict[str, str], rank: int) -> None:
    assert own_rank(environ) == rank


FOLLOWER = """
import sys
from triton_repo.cpu_executor import bindings as trtllm
executor = trtllm.Executor(sys.argv[1], trtllm.ModelType.DECODER_ONLY, trtllm.ExecutorConfig())
assert not executor.can_enqueue_requests()
try:
    executor.enqueue_request(trtllm.Request(input_token_ids=[1], max_tokens=1))
except RuntimeError as error:
    print(error, flush=True)
executor.shutdown()
print("ended", flush=True)
"""


def test_a_rank_that_is_not_the_leader_takes_nothing_and_waits(tmp_path: Path) -> None:
    folder = engine.build(MODEL, tmp_path / "engine")
    (folder / "model.safetensors").unlink()  # only the leader needs weights
    with subprocess.Popen(
        [sys.executable, "-c", FOLLOWER, str(folder)],
        env=os.environ | {"OMPI_COMM_WORLD_RANK": "1"},
        stdout=subprocess.PIPE,
        text=True,
    ) as follower:
        assert follower.stdout is not None
        assert "cannot enqueue" in follower.stdout.readline()
        with pytest.raises(subprocess.TimeoutExpired):
            follower.wait(1)
        follower.kill()
        assert follower.stdout.read() == ""


def test_every_rank_refuses_what_it_cannot_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = engine.build(MODEL, tmp_path / "engine")
    monkeypatch.setenv("PMIX_RANK", "1")
    config = trtllm.ExecutorConfig(max_beam_width=9)
    with pytest.raises(RuntimeError, match="max_beam_width"):
        trtllm.Executor(folder, trtllm.ModelType.DECODER_ONLY, config)

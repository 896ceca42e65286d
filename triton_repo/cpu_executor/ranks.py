"""Which rank of an MPI job this process is, by what its launcher wrote into the environment."""

from __future__ import annotations

from collections.abc import Mapping

# Open MPI, then any launcher that speaks PMIx (`srun --mpi=pmix`), then plain Slurm.
VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "SLURM_PROCID")


def own_rank(environ: Mapping[str, str]) -> int:
    """0 for the leader, and for a process that no launcher started."""
    for name in VARIABLES:
        if name in environ:
            return int(environ[name])
    return 0

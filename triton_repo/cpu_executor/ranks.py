"""The MPI rank of this process, from its launcher's environment variables."""

from __future__ import annotations

from collections.abc import Mapping

# Variables with the rank, by precedence: of Open MPI, of launchers that speak PMIx (`srun
# --mpi=pmix`), and of plain Slurm.
VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "SLURM_PROCID")


def own_rank(environ: Mapping[str, str]) -> int:
    """Return the rank of this process; 0 for the leader and for a process without a launcher."""
    for name in VARIABLES:
        if name in environ:
            return int(environ[name])
    return 0

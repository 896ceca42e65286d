"""The MPI rank of this process, from environment variables that the launcher sets."""

from __future__ import annotations

from collections.abc import Mapping

# Variables with the rank, by precedence: the variable of Open MPI, of launchers with PMIx (`srun
# --mpi=pmix`), and of plain Slurm.
VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "SLURM_PROCID")


def own_rank(environ: Mapping[str, str]) -> int:
    """Return the MPI rank of this process.

    The rank is 0 for the leader, and for a process that no MPI launcher has started.
    """
    for name in VARIABLES:
        if name in environ:
            return int(environ[name])
    return 0

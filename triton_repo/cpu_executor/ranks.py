"""The MPI rank of this process, from environment variables that the launcher sets."""

from __future__ import annotations

from collections.abc import Mapping

# Variables with the rank, by precedence: the variable of Open MPI, of launchers with PMIx (`srun
# --mpi=pmix`), and of plain Slurm.
VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "SLURM_PROCID")


def own_rank(environ: Mapping[str, str]) -> int:
    """Return the rank of this process. It is 0 for the leader, and without a launcher."""
    for name in VARIABLES:
        if name in environ:
            return int(environ[name])
    return 0

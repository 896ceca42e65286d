"""The MPI rank of this process, from its launcher's environment variables."""

from __future__ import annotations

from collections.abc import Mapping

# Open MPI, then any launcher that speaks PMIx (`srun --mpi=pmix`), then plain Slurm.
VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "SLURM_PROCID")


def own_rank(environ: Mapping[str, str]) -> int:
    """Return the rank; 0 for the leader, and for a process without a launcher."""
    for name in VARIABLES:
        if name in environ:
            return int(environ[name])
    return 0

"""The MPI rank and size of ``tensorrt_llm._utils``."""

from __future__ import annotations

import os

from triton_repo.cpu_executor.ranks import own_rank


def global_mpi_rank() -> int:
    return own_rank(os.environ)


def global_mpi_size() -> int:
    """Return 1: the CPU executor is one process, and the leader does all the work."""
    return 1

"""Replacements for the functions of ``tensorrt_llm._utils`` that return MPI rank and size."""

from __future__ import annotations

import os

from triton_repo.cpu_executor.ranks import own_rank


def global_mpi_rank() -> int:
    return own_rank(os.environ)


def global_mpi_size() -> int:
    """Return 1, because the CPU executor always runs in a single process."""
    return 1

"""Triton's shared memory regions, one or more per Python model instance."""

from __future__ import annotations

import hashlib
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")


def region_prefix(state_dir: Path) -> str:
    """Return the prefix of this stack's regions.

    It is derived from the state folder, which only one stack at a time can use, so the next stack
    finds what a killed one left.
    """
    folder = state_dir.stat()
    digest = hashlib.sha256(f"{folder.st_dev}:{folder.st_ino}:{state_dir.absolute()}".encode())
    return f"gateway_up_{digest.hexdigest()[:12]}_"


def remove_regions(prefix: str) -> None:
    """Remove remaining regions; Triton does so itself unless it is killed."""
    for region in SHARED_MEMORY.glob(f"{prefix}*"):
        region.unlink(missing_ok=True)

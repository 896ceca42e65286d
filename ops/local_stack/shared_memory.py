"""Triton's shared memory regions, one or more per Python model instance."""

from __future__ import annotations

import hashlib
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")


def region_prefix(state_dir: Path) -> str:
    """The prefix of this stack's regions.

    It follows from the state folder, of which one stack at a time may run: what a killed
    stack left behind is found by the next one.
    """
    folder = state_dir.stat()
    digest = hashlib.sha256(f"{folder.st_dev}:{folder.st_ino}:{state_dir.absolute()}".encode())
    return f"gateway_up_{digest.hexdigest()[:12]}_"


def remove_regions(prefix: str) -> None:
    """Removes what is left; Triton does so itself unless it is killed."""
    for region in SHARED_MEMORY.glob(f"{prefix}*"):
        region.unlink(missing_ok=True)

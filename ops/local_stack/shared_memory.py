"""Names and removal of Triton's shared memory files.

Triton exchanges tensors with each instance of a Python model through one or more of these files.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")


def region_prefix(state_dir: Path) -> str:
    """Return the prefix of the names of this stack's shared memory files.

    The prefix depends only on the state folder. If a stack is killed, the next stack with the same
    state folder can therefore find and remove the remaining files.
    """
    folder = state_dir.stat()
    digest = hashlib.sha256(f"{folder.st_dev}:{folder.st_ino}:{state_dir.absolute()}".encode())
    return f"gateway_up_{digest.hexdigest()[:12]}_"


def remove_regions(prefix: str) -> None:
    """Remove the shared memory files that a killed Triton has left."""
    for region in SHARED_MEMORY.glob(f"{prefix}*"):
        region.unlink(missing_ok=True)

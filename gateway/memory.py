"""Free memory back to the system: glibc keeps it for the process."""

from __future__ import annotations

import ctypes

# Other C libraries have none.
_TRIM = getattr(ctypes.CDLL(None), "malloc_trim", None)


def trim() -> None:
    """Gives back what is free, wherever it lies; without glibc does nothing."""
    if _TRIM is not None:
        _TRIM(0)

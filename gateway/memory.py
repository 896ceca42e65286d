"""Release of free heap memory to the operating system. By default, glibc retains this memory.

See decision 047 in docs/decisions.
"""

from __future__ import annotations

import ctypes

# Function of glibc that returns free heap memory to the system; None with another C library.
_TRIM = getattr(ctypes.CDLL(None), "malloc_trim", None)


def trim() -> None:
    """Release all free heap memory to the system. Do nothing without glibc."""
    if _TRIM is not None:
        _TRIM(0)

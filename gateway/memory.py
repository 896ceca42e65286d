"""Release of free memory to the operating system; by default glibc retains it for the process.

See decision 047 in docs/decisions.
"""

from __future__ import annotations

import ctypes

# Only glibc has this function.
_TRIM = getattr(ctypes.CDLL(None), "malloc_trim", None)


def trim() -> None:
    """Release all free heap memory to the system. Do nothing without glibc."""
    if _TRIM is not None:
        _TRIM(0)

"""Freed memory that glibc holds is returned to the system."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

# The program frees all but every 200th block, as glibc by itself returns only memory at the end of
# its heap.
_PROGRAM = """
import os
from gateway.memory import trim

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 2**20

blocks = [bytes(8000) for _ in range(16_000)]
for start in range(0, len(blocks), 200):
    blocks[start:start + 199] = [None] * 199
before = resident()
trim()
print(before, resident())
"""


@pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="another C library than glibc"
)
def test_what_was_freed_goes_back() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM], capture_output=True, text=True, check=True
    )
    before, after = map(int, done.stdout.split())
    assert before > 100, "glibc keeps what was freed"
    assert after < before / 2

"""GPU models by name, with the memory that programs can use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

_MIB = 1024**2


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU model. `memory` is the usable memory in bytes."""

    name: str
    memory: int


# Values of nvidia-smi's `memory.total` in MiB, with ECC on if the GPU has ECC. They are below the
# values in data sheets, and differ by a few MiB between drivers.
_MEMORY_MIB = {
    "T4": 15360,
    "A10": 23028,
    "A10G": 23028,
    "A30": 24576,
    "A40": 46068,
    "A100-40": 40960,
    "A100-80": 81920,
    "L4": 23034,
    "L40": 46068,
    "L40S": 46068,
    "H100": 81559,
    "H100-NVL": 95830,
    "H200": 143771,
    "GH200": 97871,
    "B200": 183359,
}
GPUS: Mapping[str, Gpu] = {name: Gpu(name, mib * _MIB) for name, mib in _MEMORY_MIB.items()}


def find_gpu(name: str) -> Gpu:
    """Return a GPU by its name. Case and a suffix GB (A100-80GB) are ignored.

    Raises ValueError for an unknown name. The message lists the known names.
    """
    wanted = name.upper().removesuffix("GB")
    if wanted not in GPUS:
        raise ValueError(f"--gpu: found {name!r}; allowed: {', '.join(GPUS)}")
    return GPUS[wanted]

"""What happened at an engine that is worth counting: weights sent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

UploadCause = Literal["first_use", "evicted", "restarted", "refused"]


@dataclass(frozen=True, slots=True)
class AdapterUpload:
    """Weights that went to the engine: `seconds` from reading them to its first response.

    The cause `refused` means in vain: the engine's cache was full of adapters in use.
    """

    adapter: str
    cause: UploadCause
    nbytes: int
    seconds: float

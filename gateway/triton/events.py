"""Events of an engine that are counted in metrics: uploads of adapter weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

UploadCause = Literal["first_use", "evicted", "restarted", "refused"]


@dataclass(frozen=True, slots=True)
class AdapterUpload:
    """An upload of adapter weights to the engine.

    `seconds` is the time from reading the weights to the engine's first response. The cause
    `refused` marks an upload in vain: the engine's cache was full of adapters in use.
    """

    adapter: str
    cause: UploadCause
    nbytes: int
    seconds: float

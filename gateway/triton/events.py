"""`AdapterUpload`, an event for metrics: an upload of LoRA adapter weights to an engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

UploadCause = Literal["first_use", "evicted", "restarted", "refused"]


@dataclass(frozen=True, slots=True)
class AdapterUpload:
    """An upload of adapter weights to the engine.

    Attributes:
        adapter: the adapter's name.
        cause: the reason for the upload. "refused" means that the upload was in vain, because the
            engine's cache was full of adapters in use.
        nbytes: the size of the weights in bytes.
        seconds: the time from reading the weights to the engine's first response.
    """

    adapter: str
    cause: UploadCause
    nbytes: int
    seconds: float

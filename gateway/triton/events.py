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
        cause: why the adapter was not in the engine's cache: "first_use", "evicted" or "restarted".
            "refused" instead if the engine refused the upload, because its cache was full of
            adapters in use.
        nbytes: the size of the weights in bytes.
        seconds: the time from reading the weights to the engine's first response.
    """

    adapter: str
    cause: UploadCause
    nbytes: int
    seconds: float

"""Events at an engine that are counted: uploads of adapter weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

UploadCause = Literal["first_use", "evicted", "restarted", "refused"]


@dataclass(frozen=True, slots=True)
class AdapterUpload:
    """An upload of weights to the engine. `seconds` are from reading them to its first response.

    The cause `refused` means that it was in vain: the engine's cache was full of adapters in use.
    """

    adapter: str
    cause: UploadCause
    nbytes: int
    seconds: float

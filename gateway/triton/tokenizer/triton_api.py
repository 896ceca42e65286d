"""Interface for the calls to Triton that the comparison of tokenizers needs."""

from __future__ import annotations

from typing import Any, Protocol


class TritonApi(Protocol):
    """Calls to one Triton server. They raise GatewayError on failure, or TimeoutError."""

    async def model_ready(self, model: str) -> bool: ...

    async def model_config(self, model: str) -> Any: ...

    async def infer_once(self, request: bytes, timeout_s: float) -> bytes: ...

"""Warnings about adapters that do not fit the engines' LoRA caches or tensor parallel size."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from adapters import sizes
from adapters.base_model import BaseModel
from adapters.errors import AdapterError
from gateway.catalog.adapters import AdapterCatalog
from gateway.errors import GatewayError
from gateway.triton.model_capabilities import ModelCapabilities


class EngineFit:
    """Comparison of the served adapters with the engines."""

    def __init__(
        self,
        adapters: AdapterCatalog,
        capabilities: Callable[[], Sequence[ModelCapabilities]],
        base_model: Callable[[], BaseModel],
    ) -> None:
        """Compare `adapters` with the model variants whose capabilities `capabilities` returns."""
        self._adapters = adapters
        self._capabilities = capabilities
        self._base_model = base_model

    def warnings(self) -> dict[str, str]:
        """Return a warning for each problem of the served adapters with the engines, by a fixed
        key.
        """
        found = {}
        served = [(record.name, record.version.tp_size) for record in self._adapters.records]
        made = ", ".join(f"{name} ({tp_size})" for name, tp_size in served if tp_size)
        if made and any(
            each.lora_dtype and not each.lora_tp_size for each in self._upload_capabilities()
        ):
            found["tp_size"] = (
                "the engine's config.json is out of sight, and with another tp_size than these "
                f"adapters are laid out for it gives wrong answers: {made}"
            )
        fit = self.compute_cache_fit()
        if fit is not None and not fit.host_holds_all:
            known = len(self._adapters.records)
            found["host_cache"] = (
                f"the engine's host cache holds about {fit.host_adapters} of {known} adapters; "
                "the others are sent again when they are used. "
                f"lora_cache_host_memory_bytes:{fit.bytes_needed} holds all"
            )
        return found

    def compute_cache_fit(self) -> sizes.CacheFit | None:
        """Return how the served versions fit the engine's LoRA caches. Return None if this is
        unknown.
        """
        served = [record.version.modules for record in self._adapters.records]
        # Consider only engines to which adapters are uploaded: others have the LLM API's cache,
        # which is limited by the number of adapters.
        if not (sent := self._upload_capabilities()):
            return None
        settings = sizes.CacheSettings(host_bytes=sent[0].lora_host_bytes)
        try:
            return sizes.cache_fit(self._base_model(), served, settings)
        except (GatewayError, AdapterError):
            return None  # without config.json, the engine's cache pages are unknown

    def _upload_capabilities(self) -> list[ModelCapabilities]:
        """Return the capabilities of the model variants to which adapters are uploaded.

        Variants that read adapters from disk are left out, because they report little about their
        limits.
        """
        try:
            return [each for each in self._capabilities() if not each.reads_adapters]
        except GatewayError:
            return []

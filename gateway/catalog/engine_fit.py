"""Warnings about adapters that do not fit an engine's LoRA cache or tensor parallel size."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from adapters import sizes
from adapters.base_model import BaseModel
from adapters.errors import AdapterError
from gateway.catalog.adapters import AdapterCatalog
from gateway.errors import GatewayError
from gateway.triton.model_capabilities import ModelCapabilities


class EngineFit:
    """Check of the served adapters against the engines' LoRA cache and tensor parallel size."""

    def __init__(
        self,
        adapters: AdapterCatalog,
        capabilities: Callable[[], Sequence[ModelCapabilities]],
        base_model: Callable[[], BaseModel],
    ) -> None:
        """Prepare the check.

        Args:
            adapters: the catalog of adapters.
            capabilities: returns the capabilities of each model variant (group of equal replicas).
            base_model: returns the base model.
        """
        self._adapters = adapters
        self._capabilities = capabilities
        self._base_model = base_model

    def warnings(self) -> dict[str, str]:
        """Return the warnings for operators about adapters that do not fit the engines.

        The key "tp_size" warns of adapters that require a certain tensor parallel size, if the size
        of an engine is unknown. The key "host_cache" warns that not all adapters fit in the
        engine's LoRA cache in host memory.
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
        """Return how many of the served adapter versions fit in the engine's LoRA caches.

        Return None if the size of the caches is unknown, or if adapters are not uploaded to any
        engine.
        """
        served = [record.version.modules for record in self._adapters.records]
        # Check only engines to which adapters are uploaded. All other engines use TensorRT-LLM's
        # LLM API, whose cache is limited by a number of adapters instead of bytes.
        if not (sent := self._upload_capabilities()):
            return None
        settings = sizes.CacheSettings(host_bytes=sent[0].lora_host_bytes)
        try:
            return sizes.cache_fit(self._base_model(), served, settings)
        except (GatewayError, AdapterError):
            return None  # without config.json, the engine's cache pages are unknown

    def _upload_capabilities(self) -> list[ModelCapabilities]:
        """Return the capabilities of all model variants that do not read adapters from disk.

        Return an empty list if no replica is ready.
        """
        try:
            return [each for each in self._capabilities() if not each.reads_adapters]
        except GatewayError:
            return []

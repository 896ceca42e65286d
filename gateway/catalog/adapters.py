"""Catalog of the base model's LoRA adapters.

For each request, the gateway looks up the model name here and gets an adapter version. The module
`administration` adds and removes adapters. The module `disk_placement` tracks which replicas have
an adapter on disk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from urllib.parse import quote

from adapters import registry
from adapters.base_model import BaseModel
from adapters.errors import AdapterError
from adapters.record import Record, Version, selected_name
from gateway.catalog.disk_placement import DiskPlacement
from gateway.config.settings import Settings
from gateway.errors import EngineError, GatewayError, ModelNotFound, UnsupportedParameter
from gateway.generation.lora import Lora
from gateway.triton.model_capabilities import ModelCapabilities
from lora_store.disk import Disk
from lora_store.redis import RedisSettings, RedisTier
from lora_store.tiered import TieredStore


class AdapterCatalog:
    """Catalog of adapter names and versions.

    Each lookup reads an immutable snapshot of the names and versions. Use the catalog as an async
    context manager. All calls must come from the same event loop.
    """

    def __init__(
        self,
        settings: Settings,
        capabilities: Callable[[], Sequence[ModelCapabilities]],
        base_model: Callable[[], BaseModel],
        is_taken: Callable[[str], bool] = lambda _: False,
    ) -> None:
        """Open the store of the base model's adapters.

        Args:
            settings: the settings of this process.
            capabilities: returns the capabilities of each model variant (group of equal replicas).
            base_model: returns the base model that adapters have to fit.
            is_taken: returns True if a name belongs to an embedding or ranking model.
        """
        self._model_name = settings.model_name
        self._capabilities = capabilities
        self._is_taken = is_taken
        # Use a separate folder and separate Redis keys for each base model. An adapter of another
        # base model must not be found here: even if its shapes fit, the responses would be wrong.
        home = quote(settings.model_name, safe="")
        self.folder = settings.store_dir / home
        """Folder of this base model's adapters."""
        redis, shared = None, None
        if settings.redis_url is not None:
            shared = RedisSettings(
                settings.redis_url, prefix=f"lora:{home}", ttl_s=settings.redis_ttl
            )
            redis = RedisTier(shared)
        self.store = TieredStore(Disk(self.folder), redis, memory_bytes=settings.memory_bytes)
        self.registry = registry.Registry(self.store)
        self.store.on_change = self.registry.refresh
        self.disks = DiskPlacement(
            settings,
            self.folder / "peft",
            store=self.store,
            redis=shared,
            records=self.all_records,
            base_model=base_model,
        )

    async def __aenter__(self) -> AdapterCatalog:
        await self.store.__aenter__()
        await self.registry.load()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.disks.close()
        await self.store.__aexit__(None, None, None)

    def all_records(self) -> Iterable[Record]:
        """Return the registry's record of each adapter, including adapters of other base models."""
        return self.registry.snapshot.records.values()

    @property
    def records(self) -> list[Record]:
        """Registry records of the adapters that this gateway serves, sorted by adapter name."""
        own = [
            record
            for record in self.all_records()
            if self._is_own(record.version) and not self._is_taken(record.name)
        ]
        return sorted(own, key=lambda record: record.name)

    def _is_own(self, version: Version) -> bool:
        return version.base == self._model_name

    def has(self, name: str) -> bool:
        """Return True if this base model has an adapter named `name`.

        The result is True even if an embedding or ranking model has the same name. In this case,
        requests with the name reach that model instead of the adapter.
        """
        known = self.registry.snapshot.records.get(name)
        return known is not None and self._is_own(known.version)

    def record(self, name: str) -> Record:
        """Return the registry's record of the adapter `name`.

        Raise UnknownAdapter if no adapter has this name.
        """
        return self.registry.snapshot.record(name)

    def resolve(self, model: str) -> tuple[Lora, Version]:
        """Return the adapter version for the model name ``NAME`` or ``NAME@DIGEST``.

        ``NAME`` selects the adapter's current version. The request uses this version until the
        request ends, even if an operator selects another current version meanwhile.

        Returns:
            Two objects for the version: the `Lora` for the engine request, and the registry's
            `Version`.

        Raises:
            ModelNotFound: no adapter of this base model has this name or version.
            GatewayError: no model variant can run the version.
        """
        try:
            version = self.registry.snapshot.resolve(model)
        except AdapterError:
            version = None
        if version is None or not self._is_own(version):
            raise ModelNotFound(model)
        refused: GatewayError | None = None
        for served in self._capabilities():
            if (why := self._find_refusal(served, model, version)) is None:
                break
            refused = refused or why
        else:
            assert refused is not None
            raise refused
        return Lora(
            selected_name(model),
            version.task_id,
            version.nbytes,
            partial(self.store.get, version.weights),
            folders=self.disks.folders_of(version.weights),
            dtype=version.dtype,
            tp_size=version.tp_size,
        ), version

    def _find_refusal(
        self, served: ModelCapabilities, model: str, version: Version
    ) -> GatewayError | None:
        """Return the error for the client if a model variant cannot run an adapter version.

        Return None if the variant can run the version. A model variant is a group of equal
        replicas.
        """
        wanted = served.lora_dtype
        if served.reads_adapters:
            if self.disks.is_followed:
                return None
            return EngineError(
                "The inference server reads adapters from its own disk, and nothing copies them "
                "there: the gateway needs GATEWAY_PEFT_DIR, or GATEWAY_REDIS_URL and agents."
            )
        if wanted is None:
            return UnsupportedParameter(
                f"The model `{model}` is a LoRA adapter, which {served.model!r} of this server "
                "does not take.",
                param="model",
            )
        if version.dtype != wanted:
            return EngineError(
                f"The adapter holds {version.dtype} weights and the engine takes {wanted}; add "
                "the adapter again."
            )
        if not served.takes_weights(version.dtype, version.tp_size):
            return EngineError(
                f"The adapter is laid out for tp_size {version.tp_size} and the engine has tp_size "
                f"{served.lora_tp_size}; add the adapter again."
            )
        return None

    def name_of(self, task_id: int) -> str:
        """Return the name of the adapter that has a version with the LoRA task id `task_id`.

        The name is used as a metrics label. Return "removed" if no adapter version has this task
        id.
        """
        for record in self.registry.snapshot.records.values():
            if any(version.task_id == task_id for version in record.versions):
                return record.name
        return "removed"

    @property
    def names_in_use(self) -> set[str]:
        """Names of the adapters that running requests use, for metrics.

        Only adapters on replicas that read adapters from their disks are included.
        """
        used = self.disks.placement.in_use()
        return {r.name for r in self.all_records() if any(v.weights in used for v in r.versions)}

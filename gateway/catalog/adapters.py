"""The adapters of this process: the version behind each name, and operators' changes.

Connects `adapters` (the format of an adapter), `lora_store` (the stored versions) and the engine
(the adapters it accepts). Conversion runs in a thread; requests read an immutable snapshot.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

from adapters import chat_template, registry, sizes
from adapters.adapter import Converted
from adapters.chat_template import ChatTemplate
from adapters.errors import (
    AdapterError,
    BaseMismatch,
    InvalidName,
    SourceUnavailable,
    StoreError,
    UnsupportedFeature,
)
from adapters.record import DECLARED, SETTINGS, Record, Version, check_name, selected_name
from gateway.catalog.conversion import Conversion, Converter
from gateway.catalog.disks import AgentDisks, SharedDisk
from gateway.catalog.placement import Placement
from gateway.catalog.shortfall import ShortfallLog, find_shortfalls
from gateway.config.file import Configuration
from gateway.config.settings import Settings
from gateway.errors import EngineError, GatewayError, ModelNotFound, UnsupportedParameter
from gateway.generation import Lora
from gateway.sources.fetch import Sources, stamp_of
from gateway.sources.source import parse_prefix
from gateway.tokenization.prompts import Prompts
from gateway.triton.model_capabilities import ModelCapabilities
from gateway.troubles import Troubles
from lora_store.disk import Disk
from lora_store.peft_notices import PeftNotices
from lora_store.redis import RedisSettings, RedisTier
from lora_store.tiered import TieredStore

log = logging.getLogger(__name__)

_POLL_INTERVAL_S = 1.0
_WAITING_POLL_INTERVAL_S = 0.25
_MIN_GRACE_S = 3600.0


class AddedVersion(NamedTuple):
    """A name after a version was added to it, and notes for the operator."""

    record: Record
    notes: tuple[str, ...]


class AdapterCatalog:
    """Adapter names, tensors and changes. Use as an async context manager on the event loop."""

    def __init__(
        self,
        settings: Settings,
        prompts: Prompts,
        capabilities: Callable[[], Sequence[ModelCapabilities]],
        is_taken: Callable[[str], bool] = lambda _: False,
    ) -> None:
        """Open the store of the base model's adapters.

        Args:
            settings: the settings of this process.
            prompts: checks chat templates.
            capabilities: returns the capabilities of each model variant in the pool.
            is_taken: returns True if a name belongs to another model.
        """
        self._is_taken = is_taken
        self._settings = settings
        self._prompts = prompts
        self._capabilities = capabilities
        # Each base model has its own adapters: another model may share their shapes, but never
        # their weights.
        home = quote(settings.model_name, safe="")
        redis, shared = None, None
        if settings.redis_url is not None:
            shared = RedisSettings(
                settings.redis_url, prefix=f"lora:{home}", ttl_s=settings.redis_ttl
            )
            redis = RedisTier(shared)
        folder = settings.store_dir / home
        self.declared_dir = folder / "declared"
        """Folder in which the processes of this store agree which one loads declared adapters."""
        self.store = TieredStore(Disk(folder), redis, memory_bytes=settings.memory_bytes)
        self._registry = registry.Registry(self.store)
        self.store.on_change = self._registry.refresh
        self._converter = Converter(settings, capabilities)
        self.sources = Sources(
            settings.store_dir / "@incoming",  # no model's folder has this name
            map(parse_prefix, settings.adapter_sources),
            root=settings.adapter_root,
            max_bytes=settings.max_adapter_bytes,
            timeout_s=settings.adapter_source_timeout,
        )
        self.placement = Placement()
        """Versions on the disks of replicas that read adapters from disk."""
        self._disks: AgentDisks | SharedDisk | None = None
        if settings.peft_dir is not None:
            self._disks = SharedDisk(
                folder / "peft",
                settings.peft_dir,
                self.placement,
                store=self.store,
                records=self._all_records,
                base=self._converter.base_model,
                grace_s=max(_MIN_GRACE_S, 2 * settings.request_timeout),
            )
        elif shared is not None:
            notices = PeftNotices(shared)
            self._disks = AgentDisks(notices, self.placement, self._converter.base_model)
        self.shortfalls = ShortfallLog()
        self.refused: dict[str, str] = {}
        """Adapters of the settings that could not be registered, with the reason."""

    def update(self, configuration: Configuration) -> None:
        """Apply the base model aliases of a new configuration."""
        self._converter.aliases = configuration.base_model_aliases

    async def __aenter__(self) -> AdapterCatalog:
        await self.store.__aenter__()
        await self._registry.load()
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._disks is not None:
            self._disks.close()
        self.sources.close()
        await self.store.__aexit__(None, None, None)

    async def follow_disks(
        self, disks: Callable[[], Mapping[str, bool]], troubles: Troubles
    ) -> None:
        """Update `placement` while some replica reads adapters from disk. Runs until cancelled.

        `disks` returns, by replica endpoint, whether it currently reads adapters from disk.
        """
        while True:
            try:
                if self._disks is not None and any(disks().values()):
                    await self._disks.poll()
                    self.shortfalls.update(find_shortfalls(self.placement, disks()))
                troubles.clear("placement")
            except (StoreError, OSError, AdapterError, GatewayError) as error:
                text = f"what replicas have on their disks is as it was: {error}"
                troubles.hold("placement", logging.WARNING, text)
            except Exception as error:  # polling must continue whatever agents report
                text = f"looking at what replicas have on their disks failed: {error!r}"
                troubles.hold("placement", logging.ERROR, text, exc_info=True)
            self.placement.wake()
            await asyncio.sleep(
                _WAITING_POLL_INTERVAL_S if self.placement.waiting else _POLL_INTERVAL_S
            )

    def _all_records(self) -> Iterable[Record]:
        return self._registry.snapshot.records.values()

    @property
    def records(self) -> list[Record]:
        """Served names, sorted."""
        own = [
            record
            for record in self._all_records()
            if self._is_own(record.version) and not self._is_taken(record.name)
        ]
        return sorted(own, key=lambda record: record.name)

    def _is_own(self, version: Version) -> bool:
        return version.base == self._settings.model_name

    def has(self, name: str) -> bool:
        """Return True if an adapter of this name exists, served or not."""
        known = self._registry.snapshot.records.get(name)
        return known is not None and self._is_own(known.version)

    def record(self, name: str) -> Record:
        return self._registry.snapshot.record(name)

    def resolve(self, model: str) -> tuple[Lora, Version]:
        """Return the adapter version that ``NAME`` or ``NAME@DIGEST12`` means now.

        A request uses this version to its end, even if the name changes. Raise ModelNotFound for an
        unknown name.
        """
        try:
            version = self._registry.snapshot.resolve(model)
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
            folders=None if self._disks is None else self.placement.of(version.weights),
            dtype=version.dtype,
            tp_size=version.tp_size,
        ), version

    def _find_refusal(
        self, served: ModelCapabilities, model: str, version: Version
    ) -> GatewayError | None:
        """Return why replicas of a variant cannot run this version, None if they can."""
        wanted = served.lora_dtype
        if served.reads_adapters:
            if self._disks is not None:
                return None
            return EngineError(
                "The inference server reads adapters from its own disk, and nothing brings them "
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

    async def register_configured(self) -> None:
        """Add the adapters of the settings, unless their content is already known under that name.

        Known content is skipped, so that a restart does not undo a rollback.
        """
        for name, folder in self._settings.adapters.items():
            try:
                async with _require_unchanged(folder):
                    converted, notes = await self._converter.convert(folder, within=None)
                    found = await asyncio.to_thread(chat_template.read, folder)
                template = self._prompts.accept(found)
                known = self._registry.snapshot.records.get(name)
                contents = {(v.weights, v.chat_template) for v in known.versions} if known else ()
                if (converted.digest, template) not in contents:
                    base = self._settings.model_name
                    added = (name, base, converted, str(folder), template, SETTINGS)
                    await self._add(*added, notes=notes)
            except (AdapterError, StoreError) as error:
                log.error("adapter %r of GATEWAY_ADAPTERS was refused: %s: %s", name, folder, error)
                self.refused[name] = f"{folder}: {error}"

    async def add(
        self,
        name: str,
        base: str,
        folder: Path,
        *,
        source: str,
        within: Path | None,
        added_by: str | None = None,
    ) -> AddedVersion:
        """Convert the adapter in `folder` (PEFT or npy files) and serve it under `name`.

        Every file must resolve to a path inside `within`. Raise a subclass of AdapterError if the
        adapter is refused.
        """
        (converted, notes), template = await self._convert_with_template(folder, within)
        added = (name, base, converted, source, template, added_by)
        return AddedVersion(await self._add(*added, notes=notes), notes)

    async def declare(self, name: str, folder: Path, within: Path, source: str) -> str:
        """Serve the content of `folder` under `name`, and return its digest.

        Content that was declared last is skipped, so that a rollback holds. Raise a subclass of
        AdapterError if the adapter is refused.
        """
        base = self._settings.model_name
        self.check(name, base)
        (converted, notes), template = await self._convert_with_template(folder, within)
        await self._add(name, base, converted, source, template, DECLARED, notes=notes)
        return template.digest(converted.digest) if template else converted.digest

    async def _convert_with_template(
        self, folder: Path, within: Path | None
    ) -> tuple[Conversion, ChatTemplate | None]:
        async with _require_unchanged(folder):
            found = await asyncio.to_thread(chat_template.read, folder, within=within)
            trusted = self._settings.trust_adapter_templates
            if not trusted and not self._prompts.matches_template(found):
                raise UnsupportedFeature(
                    *("adapter", "chat_template", "another than the base model's"),
                    "the same or none",
                    "a template runs here without limits; GATEWAY_TRUST_ADAPTER_TEMPLATES takes it",
                )
            template = self._prompts.accept(found)
            return await self._converter.convert(folder, within=within), template

    def check(self, name: str, base: str) -> None:
        """Raise a subclass of AdapterError if this model cannot have an adapter of this name."""
        served = self._settings.model_name
        if not self._converter.is_base(base):
            raise BaseMismatch("request", "base", base, self._converter.base_names)
        if check_name(name) == served:
            raise InvalidName("request", "name", name, "another name than the base model's")
        if self._is_taken(name):
            allowed = "another name than those of the configuration's other models"
            raise InvalidName("request", "name", name, allowed)

    async def _add(
        self,
        name: str,
        base: str,
        converted: Converted,
        source: str,
        template: ChatTemplate | None,
        added_by: str | None = None,
        *,
        notes: Sequence[str] = (),
    ) -> Record:
        self.check(name, base)
        before = self._registry.snapshot.records.get(name)
        record = await self._registry.add(
            *(name, self._settings.model_name, converted, source, template, added_by),
            declared=added_by == DECLARED,
        )
        if record == before:
            return record
        for note in notes:
            log.warning("adapter %r: %s", name, note)
        for warning in self.warnings().values():
            log.warning("%s", warning)
        return record

    async def rollback(self, name: str, digest: str | None) -> Record:
        return await self._registry.rollback(name, digest)

    async def remove(self, name: str) -> Record:
        return await self._registry.remove(name)

    async def verify(self, name: str) -> Record:
        """Read every version of `name` and check its checksums. Raise a subclass of StoreError on
        damage.
        """
        record = self.record(name)
        for version in record.versions:
            await self.store.verify(version.weights)
        return record

    def warnings(self) -> dict[str, str]:
        """Return the text of each condition of the engine with this set of adapters, by a key."""
        found = {}
        served = [(record.name, record.version.tp_size) for record in self.records]
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
            found["host_cache"] = (
                f"the engine's host cache holds about {fit.host_adapters} of {len(self.records)} "
                "adapters; the others are sent again when they are used. "
                f"lora_cache_host_memory_bytes:{fit.bytes_needed} holds all"
            )
        return found

    def _upload_capabilities(self) -> list[ModelCapabilities]:
        """Return the capabilities of variants that adapters are uploaded to.

        Variants that read adapters from disk report little about their limits, so they are left
        out.
        """
        try:
            return [each for each in self._capabilities() if not each.reads_adapters]
        except GatewayError:
            return []

    def compute_cache_fit(self) -> sizes.CacheFit | None:
        """Return how the served versions fit the engine's caches, None while that is unknown."""
        served = [record.version.modules for record in self.records]
        # An engine that reads adapters from disk has the LLM API's cache, whose limit is a count.
        if not (sent := self._upload_capabilities()):
            return None
        settings = sizes.CacheSettings(host_bytes=sent[0].lora_host_bytes)
        try:
            return sizes.cache_fit(self._converter.base_model(), served, settings)
        except (GatewayError, AdapterError):
            return None  # without the engine's config.json its cache pages are unknown

    def name_of(self, task_id: int) -> str:
        """Return the name of the version with this task id, for metrics."""
        for record in self._registry.snapshot.records.values():
            if any(version.task_id == task_id for version in record.versions):
                return record.name
        return "removed"

    @property
    def names_in_use(self) -> set[str]:
        """Names of adapters that run now on replicas that read adapters from disk, for metrics."""
        used = self.placement.in_use()
        return {r.name for r in self._all_records() if any(v.weights in used for v in r.versions)}


@asynccontextmanager
async def _require_unchanged(folder: Path) -> AsyncIterator[None]:
    """Raise `SourceUnavailable` on leaving if the adapter's files changed inside the context.

    Otherwise some of the files could be of one release, and some of the next.
    """
    before = await asyncio.to_thread(stamp_of, folder)
    yield
    if await asyncio.to_thread(stamp_of, folder) != before:
        raise SourceUnavailable("adapter", "files", "changed while they were read", "the same")

"""The adapters of this process: which name is which version, and the changes operators make.

Glue between `adapters` (what an adapter is), `lora_store` (where versions are kept) and the
engine (what it accepts). Conversion runs in a thread; requests read an immutable snapshot.
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
from gateway.catalog.shortfall import Shortfalls, shortfalls
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

_LOOK_S = 1.0
_SOON_S = 0.25
_GRACE_S = 3600.0


class Added(NamedTuple):
    """A name after something was added to it, and what to tell of what was added."""

    record: Record
    notes: tuple[str, ...]


class Adapters:
    """Names, tensors and changes. Use as an async context manager on the event loop."""

    def __init__(
        self,
        settings: Settings,
        prompts: Prompts,
        capabilities: Callable[[], Sequence[ModelCapabilities]],
        is_taken: Callable[[str], bool] = lambda _: False,
    ) -> None:
        """`capabilities` are those of each kind of replicas that is there, and `is_taken` says
        whether a name is another model's."""
        self._is_taken = is_taken
        self._settings = settings
        self._prompts = prompts
        self._capabilities = capabilities
        # Each base model has its own adapters: another may have their shapes, never their weights.
        home = quote(settings.model_name, safe="")
        redis, shared = None, None
        if settings.redis_url is not None:
            shared = RedisSettings(
                settings.redis_url, prefix=f"lora:{home}", ttl_s=settings.redis_ttl
            )
            redis = RedisTier(shared)
        folder = settings.store_dir / home
        self.declared_dir = folder / "declared"
        """Where the processes on this store agree who looks after what is declared."""
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
        """Which replicas have what on their disks, of those that read adapters from there."""
        self._disks: AgentDisks | SharedDisk | None = None
        if settings.peft_dir is not None:
            self._disks = SharedDisk(
                folder / "peft",
                settings.peft_dir,
                self.placement,
                store=self.store,
                records=self._known,
                base=self._converter.base_model,
                grace_s=max(_GRACE_S, 2 * settings.request_timeout),
            )
        elif shared is not None:
            notices = PeftNotices(shared)
            self._disks = AgentDisks(notices, self.placement, self._converter.base_model)
        self.lacking = Shortfalls()
        self.refused: dict[str, str] = {}
        """Adapters of the configuration that could not be registered, with the reason."""

    def update(self, configuration: Configuration) -> None:
        """Take the aliases of a configuration that comes into force."""
        self._converter.aliases = configuration.base_model_aliases

    async def __aenter__(self) -> Adapters:
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
        """Keeps `placement` true while some replica needs it; until cancelled.

        `disks` says of each replica's endpoint whether it reads adapters from its disk now.
        """
        while True:
            try:
                if self._disks is not None and any(disks().values()):
                    await self._disks.look()
                    self.lacking.note(shortfalls(self.placement, disks()))
                troubles.clear("placement")
            except (StoreError, OSError, AdapterError, GatewayError) as error:
                text = f"what replicas have on their disks is as it was: {error}"
                troubles.hold("placement", logging.WARNING, text)
            except Exception as error:  # whatever agents told, the gateway must go on looking
                text = f"looking at what replicas have on their disks failed: {error!r}"
                troubles.hold("placement", logging.ERROR, text, exc_info=True)
            self.placement.wake()
            await asyncio.sleep(_SOON_S if self.placement.waiting else _LOOK_S)

    def _known(self) -> Iterable[Record]:
        return self._registry.snapshot.records.values()

    @property
    def records(self) -> list[Record]:
        """All names now served, sorted."""
        own = [
            record
            for record in self._known()
            if self._is_own(record.version) and not self._is_taken(record.name)
        ]
        return sorted(own, key=lambda record: record.name)

    def _is_own(self, version: Version) -> bool:
        return version.base == self._settings.model_name

    def has(self, name: str) -> bool:
        """Whether there is an adapter of this name, served or not."""
        known = self._registry.snapshot.records.get(name)
        return known is not None and self._is_own(known.version)

    def record(self, name: str) -> Record:
        return self._registry.snapshot.record(name)

    def resolve(self, model: str) -> tuple[Lora, Version]:
        """What ``NAME`` or ``NAME@DIGEST12`` means now. Raises ModelNotFound.

        A request keeps the version that it resolved to, whatever changes meanwhile.
        """
        try:
            version = self._registry.snapshot.resolve(model)
        except AdapterError:
            version = None
        if version is None or not self._is_own(version):
            raise ModelNotFound(model)
        refused: GatewayError | None = None
        for served in self._capabilities():
            if (why := self._why_not(served, model, version)) is None:
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

    def _why_not(
        self, served: ModelCapabilities, model: str, version: Version
    ) -> GatewayError | None:
        """Why replicas of a kind cannot be asked for this version; None where they can."""
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
        """Adds the adapters of the settings, unless their content is known under that name.

        Known content is left alone, so that a restart does not undo a rollback.
        """
        for name, folder in self._settings.adapters.items():
            try:
                async with _unchanged(folder):
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
    ) -> Added:
        """Converts the adapter in `folder` (PEFT or npy files) and serves it under `name`.

        Every file must really lie inside `within`. Raises subclasses of AdapterError.
        """
        (converted, notes), template = await self._prepared(folder, within)
        added = (name, base, converted, source, template, added_by)
        return Added(await self._add(*added, notes=notes), notes)

    async def declare(self, name: str, folder: Path, within: Path, source: str) -> str:
        """Makes the content of `folder` what `name` serves; its digest.

        What was declared last is left alone, so that a rollback holds. Raises AdapterError's.
        """
        base = self._settings.model_name
        self.check(name, base)
        (converted, notes), template = await self._prepared(folder, within)
        await self._add(name, base, converted, source, template, DECLARED, notes=notes)
        return template.digest(converted.digest) if template else converted.digest

    async def _prepared(
        self, folder: Path, within: Path | None
    ) -> tuple[Conversion, ChatTemplate | None]:
        async with _unchanged(folder):
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
        """Whether there can be an adapter of this name for this model. Raises AdapterError's."""
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
        """Reads every version of `name`, checksums included. Raises StoreError subclasses."""
        record = self.record(name)
        for version in record.versions:
            await self.store.verify(version.weights)
        return record

    def warnings(self) -> dict[str, str]:
        """Return the text of each condition of the engine with this set of adapters, by a key."""
        found = {}
        served = [(record.name, record.version.tp_size) for record in self.records]
        made = ", ".join(f"{name} ({tp_size})" for name, tp_size in served if tp_size)
        if made and any(each.lora_dtype and not each.lora_tp_size for each in self._engines()):
            found["tp_size"] = (
                "the engine's config.json is out of sight, and with another tp_size than these "
                f"adapters are laid out for it gives wrong answers: {made}"
            )
        fit = self.cache_fit()
        if fit is not None and not fit.host_holds_all:
            found["host_cache"] = (
                f"the engine's host cache holds about {fit.host_adapters} of {len(self.records)} "
                "adapters; the others are sent again when they are used. "
                f"lora_cache_host_memory_bytes:{fit.bytes_needed} holds all"
            )
        return found

    def _engines(self) -> list[ModelCapabilities]:
        """Those that are sent adapters; of one that reads them from its disk little is known."""
        try:
            return [each for each in self._capabilities() if not each.reads_adapters]
        except GatewayError:
            return []

    def cache_fit(self) -> sizes.CacheFit | None:
        """How the served versions fit the engine's caches; None while that is unknown."""
        served = [record.version.modules for record in self.records]
        # The cache of one that reads them from its disk is the LLM API's, by count.
        if not (sent := self._engines()):
            return None
        settings = sizes.CacheSettings(host_bytes=sent[0].lora_host_bytes)
        try:
            return sizes.cache_fit(self._converter.base_model(), served, settings)
        except (GatewayError, AdapterError):
            return None  # without the engine's config.json its cache pages are unknown

    def name_of(self, task_id: int) -> str:
        """The name that a version with this task id is served under, for metrics."""
        for record in self._registry.snapshot.records.values():
            if any(version.task_id == task_id for version in record.versions):
                return record.name
        return "removed"

    @property
    def names_in_use(self) -> set[str]:
        """Of what runs on replicas that read adapters from their disks, for metrics."""
        used = self.placement.in_use()
        return {r.name for r in self._known() if any(v.weights in used for v in r.versions)}


@asynccontextmanager
async def _unchanged(folder: Path) -> AsyncIterator[None]:
    """Raises `SourceUnavailable` at the end if the adapter's files have changed meanwhile: some of
    what was read may be of one release, and some of the next."""
    before = await asyncio.to_thread(stamp_of, folder)
    yield
    if await asyncio.to_thread(stamp_of, folder) != before:
        raise SourceUnavailable("adapter", "files", "changed while they were read", "the same")

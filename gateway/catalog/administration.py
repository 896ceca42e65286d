"""Administration of LoRA adapters: add, roll back, remove and verify them.

This module combines the packages `adapters` (file formats and registry), `lora_store` (storage of
versions) and the converter to the engines' format. Conversion runs in a thread.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

from adapters import chat_template
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
from adapters.record import DECLARED, SETTINGS, Record, check_name
from gateway.catalog.adapters import AdapterCatalog
from gateway.catalog.conversion import Conversion, Converter
from gateway.catalog.engine_fit import EngineFit
from gateway.config.file import Configuration
from gateway.config.settings import Settings
from gateway.sources.fetch import Sources, stamp_of
from gateway.sources.source import parse_prefix
from gateway.tokenization.prompts import Prompts

log = logging.getLogger(__name__)


class AddedVersion(NamedTuple):
    """Result of adding an adapter version.

    Attributes:
        record: the adapter's record in the registry, with the new version.
        notes: remarks for the operator about possible mistakes in the adapter.
    """

    record: Record
    notes: tuple[str, ...]


class AdapterAdmin:
    """Administration of the adapters in a catalog. Use it as an async context manager.

    Attributes:
        fit: object whose method `warnings` returns warnings about adapters that do not fit the
            engines.
        sources: object that fetches adapter files from folders, servers and buckets.
        refused: reason for each refused adapter of GATEWAY_ADAPTERS, by the adapter's name.
        declared_dir: folder of the lock file and the status file of `DeclaredAdapters`.
    """

    def __init__(
        self,
        settings: Settings,
        adapters: AdapterCatalog,
        converter: Converter,
        prompts: Prompts,
        fit: EngineFit,
        is_taken: Callable[[str], bool] = lambda _: False,
    ) -> None:
        """Create the administration of the catalog `adapters`.

        Args:
            settings: the settings of this process.
            adapters: the catalog.
            converter: converts adapters to the engines' format.
            prompts: checks chat templates.
            fit: its method `warnings` is called, and the warnings are logged, after each addition
                of an adapter version.
            is_taken: returns True if a name belongs to an embedding or ranking model.
        """
        self._settings = settings
        self._adapters = adapters
        self._converter = converter
        self._prompts = prompts
        self.fit = fit
        self._is_taken = is_taken
        self.declared_dir = adapters.folder / "declared"
        self.refused: dict[str, str] = {}
        self.sources = Sources(
            # Use a name with @, because `quote` encodes @ in the names of the base models' folders.
            # The folder of a base model therefore never has this name.
            settings.store_dir / "@incoming",
            map(parse_prefix, settings.adapter_sources),
            root=settings.adapter_root,
            max_bytes=settings.max_adapter_bytes,
            timeout_s=settings.adapter_source_timeout,
        )

    async def __aenter__(self) -> AdapterAdmin:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.sources.close()

    def update(self, configuration: Configuration) -> None:
        """Apply the base model aliases of a new configuration."""
        self._converter.aliases = configuration.base_model_aliases

    async def register_configured(self) -> None:
        """Add the adapters of the setting GATEWAY_ADAPTERS.

        Skip an adapter if one of its registered versions has the weights and chat template of the
        configured folder. The operator may have rolled back from this version, and a restart of the
        gateway must not undo the rollback. Log refused adapters, and store the reasons in
        `refused`.
        """
        for name, folder in self._settings.adapters.items():
            try:
                async with _require_unchanged(folder):
                    converted, notes = await self._converter.convert(folder, within=None)
                    found = await asyncio.to_thread(chat_template.read, folder)
                template = self._prompts.accept(found)
                known = self._adapters.registry.snapshot.records.get(name)
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

        Raise a subclass of AdapterError if the adapter is invalid or does not fit the base model.

        Args:
            name: the adapter's name.
            base: name or alias of the adapter's base model.
            folder: folder with the adapter's files.
            source: description of the adapter's origin, which is stored in the registry.
            within: folder in which all files must be, also the targets of symbolic links; None
                skips this check.
            added_by: description of who adds the adapter, which is stored in the registry.
        """
        (converted, notes), template = await self._convert_with_template(folder, within)
        added = (name, base, converted, source, template, added_by)
        return AddedVersion(await self._add(*added, notes=notes), notes)

    async def declare(self, name: str, folder: Path, within: Path, source: str) -> str:
        """Serve an adapter that the configuration file declares. Return the version's digest.

        Change nothing if the adapter's files are unchanged since the last call for this name. A
        rollback by the operator therefore remains in force. Raise a subclass of AdapterError if the
        adapter is invalid or does not fit the base model.

        Args:
            name: the adapter's name.
            folder: folder with the adapter's files.
            within: folder in which all files must be, also the targets of symbolic links.
            source: description of the adapter's origin, which is stored in the registry.
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
        """Raise a subclass of AdapterError if an adapter cannot have this name or base model.

        Args:
            name: must be a valid adapter name, and must not be the name of another model.
            base: must be the name or an alias of the base model that this gateway serves.
        """
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
        before = self._adapters.registry.snapshot.records.get(name)
        record = await self._adapters.registry.add(
            *(name, self._settings.model_name, converted, source, template, added_by),
            declared=added_by == DECLARED,
        )
        if record == before:
            return record
        for note in notes:
            log.warning("adapter %r: %s", name, note)
        for warning in self.fit.warnings().values():
            log.warning("%s", warning)
        return record

    async def rollback(self, name: str, digest: str | None) -> Record:
        """Serve an older version of an adapter again. Return the adapter's record.

        `digest` selects the version. None selects the version that was served before the current
        version.
        """
        return await self._adapters.registry.rollback(name, digest)

    async def remove(self, name: str) -> Record:
        """Remove an adapter and all its versions. Return the adapter's record without versions."""
        return await self._adapters.registry.remove(name)

    async def verify(self, name: str) -> Record:
        """Check the checksums of all versions of an adapter, and repair damaged files.

        Return the adapter's record. Raise a subclass of StoreError if the stored weights of a
        version cannot be repaired.
        """
        record = self._adapters.record(name)
        for version in record.versions:
            await self._adapters.store.verify(version.weights)
        return record


@asynccontextmanager
async def _require_unchanged(folder: Path) -> AsyncIterator[None]:
    """Return a context manager that checks on exit that the adapter's files are unchanged.

    Raise `SourceUnavailable` if a file has changed since the context was entered. The caller reads
    the files within the context. After a change, it may have read a mix of old and new files.
    """
    before = await asyncio.to_thread(stamp_of, folder)
    yield
    if await asyncio.to_thread(stamp_of, folder) != before:
        raise SourceUnavailable("adapter", "files", "changed while they were read", "the same")

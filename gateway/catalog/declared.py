"""Loading of the LoRA adapters that the configuration file declares.

The configuration lists adapters in `adapters`. Each subfolder of `adapters_folder` is a declared
adapter, too. When the files of an adapter change, the gateway serves the changed files as a new
version of the adapter.

The digest of the files identifies a version. If several gateways load the same changed files, only
the first gateway adds the version to the registry. The other gateways find the version in the
registry. If the operator rolls back to an older version, that version is served until the files
change again.

If several processes share a store, only the process that holds a lock loads the adapters. It writes
their status to a file, which all processes can read.

See decision 032 in docs/decisions.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple, get_args

from adapters.errors import AdapterError, InvalidName, StoreError
from adapters.record import DECLARED, check_name
from gateway.catalog.adapters import AdapterCatalog
from gateway.catalog.administration import AdapterAdmin
from gateway.config.file import Configuration
from gateway.errors import GatewayError
from gateway.sources.fetch import Stamp
from gateway.sources.source import Source, parse
from gateway.troubles import Troubles
from lora_store.folder_lock import FolderLock

log = logging.getLogger(__name__)

_POLL_INTERVAL_S = 1.0
_FIRST_RETRY_S = 1.0
_MAX_RETRY_S = 300.0
_MAX_FOLDERS = 4096

LoadState = Literal["waiting", "loaded", "failed"]


class ReportedStatus(NamedTuple):
    """Status of one declared adapter.

    Attributes:
        name: the adapter's name.
        source: the adapter's source, as text.
        state: "waiting", "loaded" or "failed".
        version: digest of the version that was loaded last; "" if no version was loaded.
        error: the reason of the last failure; "" after a success.
    """

    name: str
    source: str
    state: LoadState
    version: str
    error: str


@dataclass(slots=True)
class _State:
    source: Source
    watch: bool
    loaded_for: int = -1
    """Value of the counter `DeclaredAdapters._reloads` at the last load; -1 before any load."""
    stamp: Stamp = ()
    last_stamp: Stamp = ()
    digest: str = ""
    error: str = ""
    failures: int = 0
    retry_at: float = 0.0
    working: bool = False

    @property
    def load_state(self) -> LoadState:
        return "failed" if self.error else "loaded" if self.digest else "waiting"


class DeclaredAdapters:
    """Loader of declared adapters. Not thread-safe: use an instance in one event loop only."""

    def __init__(
        self,
        adapters: AdapterCatalog,
        admin: AdapterAdmin,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create the loader.

        Several processes may have a loader. Only the process that holds the lock in
        `admin.declared_dir` loads adapters.

        Args:
            adapters: the catalog of adapters.
            admin: adds and removes adapters of this catalog.
            clock: returns the time in seconds.
        """
        self._adapters = adapters
        self._admin = admin
        self._folder = admin.declared_dir
        self._clock = clock
        self._configuration = Configuration()
        self._reloads = 0
        self._states: dict[str, _State] = {}
        self._work: set[asyncio.Task[None]] = set()
        self._last_poll: object = None
        """Number of configuration reloads and set of adapter names at the last poll.

        None if the last poll failed.
        """
        self._pruned: object = None
        self._lock = FolderLock(self._folder / ".lock")
        self._written = ""

    def update(self, configuration: Configuration) -> None:
        """Use the adapters of a new configuration from the next poll on."""
        self._configuration = configuration
        self._reloads += 1

    async def follow(self, troubles: Troubles) -> None:
        """Load declared adapters, and reload them when their files change. Run until cancelled.

        Failures are reported to `troubles`, which shows them to operators.
        """
        try:
            while True:
                try:
                    await self._poll()
                    troubles.clear("declaration")
                except (AdapterError, StoreError, GatewayError, OSError) as error:
                    text = f"declared adapters stay as they are: {error}"
                    troubles.hold("declaration", logging.ERROR, text)
                except Exception as error:  # continue to poll after any error
                    text = f"looking after declared adapters failed: {error!r}"
                    troubles.hold("declaration", logging.ERROR, text, exc_info=True)
                # Report failed loads in every process, so that each process can show them to
                # operators. Write no log line: the process that loads the adapters has logged them.
                failed = await asyncio.to_thread(self._failure_messages)
                troubles.hold_each("declared_adapters", logging.ERROR, failed, logs=False)
                await asyncio.sleep(_POLL_INTERVAL_S)
        finally:
            for task in self._work:
                task.cancel()
            await asyncio.gather(*self._work, return_exceptions=True)
            self._release_lock()

    def counts(self) -> dict[str, int]:
        """Return how many adapters of this process are "waiting", "loaded" and "failed".

        Adapters that another process loads are not counted.
        """
        found = [state.load_state for state in self._states.values()]
        return {standing: found.count(standing) for standing in get_args(LoadState)}

    def read_report(self) -> list[ReportedStatus]:
        """Return the status of all declared adapters, or an empty list if it is unknown.

        The status comes from a file. The process that loads the adapters writes this file.
        """
        if not self._has_declarations:
            return []
        try:
            return [ReportedStatus(*entry) for entry in json.loads(self._file.read_bytes())]
        except (OSError, ValueError, TypeError):
            return []

    def _failure_messages(self) -> dict[str, str]:
        return {
            one.name: f"declared adapter {one.name!r}: {one.source}: {one.error}"
            for one in self.read_report()
            if one.state == "failed"
        }

    @property
    def _has_declarations(self) -> bool:
        declared = self._configuration
        return bool(declared.adapters or declared.adapters_folder or declared.prune_adapters)

    @property
    def _file(self) -> Path:
        return self._folder / "state.json"

    async def _poll(self) -> None:
        """Start loading new and changed adapters, and remove adapters that are no longer declared.

        Adapters are loaded in background tasks.

        Raises:
            OSError: the folder of adapters cannot be read.
            StoreError: an adapter cannot be removed.
        """
        declared = self._configuration
        before, self._last_poll = self._last_poll, None
        if not self._has_declarations:
            self._states.clear()
            self._release_lock()
            return
        if not await asyncio.to_thread(self._take_lock):
            return
        reloads = self._reloads
        wanted = {each.name: (parse(each.source), each.watch) for each in declared.adapters}
        unread: OSError | None = None
        if declared.adapters_folder is not None:
            try:
                folder = Path(declared.adapters_folder)
                found = await self._admin.sources.in_thread(
                    folder, partial(_find_subfolders, folder)
                )
                wanted = {name: (source, True) for name, source in found} | wanted
            except OSError as error:
                unread = error
                wanted = {name: (s.source, s.watch) for name, s in self._states.items()} | wanted
        for name in self._states.keys() - wanted:
            del self._states[name]
        for name, (source, watch) in wanted.items():
            state = self._states.get(name)
            if state is None or (state.source, state.watch) != (source, watch):
                self._states[name] = _State(source, watch)
        self._start_loading(
            (n for n, state in self._states.items() if self._is_due(state, reloads)), reloads
        )
        self._start_loading(await self._find_changed(reloads), reloads)
        await asyncio.to_thread(self._write)
        if unread is not None:
            raise unread
        self._last_poll = reloads, frozenset(wanted)
        if declared.prune_adapters and self._last_poll == before != self._pruned:
            await self._prune(wanted.keys())
            self._pruned = self._last_poll

    def _start_loading(self, names: Iterable[str], reloads: int) -> None:
        for name in names:
            state = self._states[name]
            state.working = True
            task = asyncio.create_task(self._load_and_record(name, state, reloads))
            self._work.add(task)
            task.add_done_callback(self._work.discard)

    def _is_due(self, state: _State, reloads: int) -> bool:
        if state.working:
            return False
        return state.loaded_for != reloads or (
            bool(state.error) and self._clock() >= state.retry_at
        )

    async def _find_changed(self, reloads: int) -> list[str]:
        """Return the names of watched adapters whose files have changed since they were loaded.

        Raise `SourceUnavailable` if a disk does not respond.
        """
        watched = {
            name: state
            for name, state in self._states.items()
            if state.watch and not (state.working or state.error) and state.loaded_for == reloads
        }
        stamps = await self._admin.sources.read_stamps(each.source for each in watched.values())
        changed = []
        for (name, state), stamp in zip(watched.items(), stamps, strict=True):
            # Reload if the files differ from the loaded files. Wait until two polls in a row have
            # found the same files, because someone may still be writing them. If `stamp` is None,
            # the source is missing: do nothing, so the loaded adapter remains.
            if stamp is not None and stamp == state.last_stamp != state.stamp:
                changed.append(name)
            state.last_stamp = stamp or ()
        return changed

    async def _load_and_record(self, name: str, state: _State, reloads: int) -> None:
        try:
            await self._load(name, state)
        except (AdapterError, StoreError, GatewayError, OSError) as error:
            if state.error != str(error):
                log.error("declared adapter %r: %s: %s", name, state.source, error)
            state.error = str(error)
            state.failures += 1
            wait_s = min(_MAX_RETRY_S, _FIRST_RETRY_S * 2.0 ** min(state.failures - 1, 20))
            state.retry_at = self._clock() + wait_s
        except Exception as error:  # a failing adapter must not stop other adapters from loading
            log.exception("declared adapter %r cannot be loaded", name)
            state.error, state.retry_at = repr(error), self._clock() + _MAX_RETRY_S
        else:
            state.error, state.failures = "", 0
        state.loaded_for = reloads
        state.working = False

    async def _load(self, name: str, state: _State) -> None:
        sources = self._admin.sources
        if state.stamp and await sources.read_stamp(state.source, trusted=True) == state.stamp:
            return
        # Use the server or bucket as the name of the caller: `fetch` downloads one adapter at a
        # time for each caller. A slow server therefore delays only adapters from this server.
        who = f"{DECLARED} {state.source.scheme}://{state.source.authority}"
        async with sources.fetch(state.source, who, trusted=True) as found:
            if self._states.get(name) is not state:
                return  # no longer declared
            digest = await self._admin.declare(name, found.folder, found.within, str(state.source))
        if digest != state.digest:
            log.info("declared adapter %r: %s is version %s", name, state.source, digest[:12])
        state.stamp, state.digest = found.stamp, digest

    async def _prune(self, wanted: Collection[str]) -> None:
        """Remove adapters that the configuration file no longer declares.

        `wanted` has the names of declared adapters. An adapter is not removed if one of its
        versions was added in another way, for example over the API.

        Call this method only if both of these conditions are met:

        - The declared names have changed. Otherwise, a gateway with an older configuration would
          remove adapters that another gateway has just added.
        - Two polls in a row have found the same names. While someone replaces an adapter's folder,
          its name is missing for a moment.
        """
        for record in self._adapters.records:
            ours = all(version.added_by == DECLARED for version in record.versions)
            if ours and record.name not in wanted:
                await self._admin.remove(record.name)
                log.warning("adapter %r was removed: it is declared no more", record.name)

    def _take_lock(self) -> bool:
        """Try to take the lock. Return True if this process has the lock and must load adapters."""
        if not self._lock.is_held:
            self._folder.mkdir(parents=True, exist_ok=True)
        return self._lock.take()

    def _release_lock(self) -> None:
        if self._lock.is_held:
            self._lock.release()
            self._written = ""

    def _write(self) -> None:
        entries = [
            ReportedStatus(name, str(state.source), state.load_state, state.digest, state.error)
            for name, state in sorted(self._states.items())
        ]
        text = json.dumps(entries)
        if text != self._written:
            new = self._file.with_suffix(".new")
            new.write_text(text, encoding="utf-8")
            new.replace(self._file)
            self._written = text


def _find_subfolders(folder: Path) -> Iterator[tuple[str, Source]]:
    """Return (name, source) of each subfolder whose name is a valid adapter name.

    Raise OSError if no subfolder has a valid name. In this case, the volume is probably not
    mounted, or it is new and contains only ``lost+found``. Also raise OSError if there are more
    than `_MAX_FOLDERS` subfolders.
    """
    found = sorted(path for path in folder.iterdir() if os.path.isdir(path))
    if len(found) > _MAX_FOLDERS:
        raise OSError(f"{folder} has {len(found)} folders; at most {_MAX_FOLDERS} are adapters")
    names = []
    for path in found:
        try:
            names.append((check_name(path.name), Source("file", "", path.absolute().parts[1:])))
        except InvalidName as error:
            log.debug("%s is no adapter: %s", path, error)
    if not names:
        raise OSError(f"{folder} has no folder that is named as an adapter can be")
    return iter(names)

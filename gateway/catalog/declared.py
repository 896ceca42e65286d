"""Keeps names what the configuration file declares: its `adapters`, and a folder's subfolders.

What acts is a change of a source's content: it becomes the served version, once, by its digest. So
several gateways that see the same change do the same, and a rollback holds until the next change.
Of the processes on one store, one does the work; all of them can tell how it stands.
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
from gateway.catalog.adapters import Adapters
from gateway.config.file import Configuration
from gateway.errors import GatewayError
from gateway.sources.fetch import Stamp
from gateway.sources.source import Source, parse
from gateway.troubles import Troubles
from lora_store.folder_lock import FolderLock

log = logging.getLogger(__name__)

_LOOK_S = 1.0
_FIRST_RETRY_S = 1.0
_LAST_RETRY_S = 300.0
_MOST_FOLDERS = 4096

Standing = Literal["waiting", "loaded", "failed"]


class Told(NamedTuple):
    """How one declared adapter stands. `version` is the digest it was last loaded as, or ""."""

    name: str
    source: str
    state: Standing
    version: str
    error: str


@dataclass(slots=True)
class _State:
    source: Source
    watch: bool
    loaded_for: int = -1
    """The reload of the configuration for which it was looked at last."""
    stamp: Stamp = ()
    glimpsed: Stamp = ()
    digest: str = ""
    error: str = ""
    failures: int = 0
    retry_at: float = 0.0
    working: bool = False

    @property
    def standing(self) -> Standing:
        return "failed" if self.error else "loaded" if self.digest else "waiting"


class Declared:
    """Belongs to one event loop."""

    def __init__(
        self,
        adapters: Adapters,
        folder: Path,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`folder` is where the processes on one store agree who does the work."""
        self._adapters = adapters
        self._folder = folder
        self._clock = clock
        self._configuration = Configuration()
        self._reloads = 0
        self._states: dict[str, _State] = {}
        self._work: set[asyncio.Task[None]] = set()
        self._seen: object = None
        """What the last look found declared, and for which reload; None where it failed."""
        self._pruned: object = None
        self._lock = FolderLock(folder / ".lock")
        self._written = ""

    def update(self, configuration: Configuration) -> None:
        """To be told of every configuration that comes into force."""
        self._configuration = configuration
        self._reloads += 1

    async def follow(self, troubles: Troubles) -> None:
        """Until cancelled."""
        try:
            while True:
                try:
                    await self._look()
                    troubles.clear("declaration")
                except (AdapterError, StoreError, GatewayError, OSError) as error:
                    text = f"declared adapters stay as they are: {error}"
                    troubles.hold("declaration", logging.ERROR, text)
                except Exception as error:  # whatever is wrong with one, this must go on looking
                    text = f"looking after declared adapters failed: {error!r}"
                    troubles.hold("declaration", logging.ERROR, text, exc_info=True)
                # Each process tells of all, whichever of them does the work and logs it.
                failed = await asyncio.to_thread(self._failed)
                troubles.hold_each("declared_adapters", logging.ERROR, failed, logs=False)
                await asyncio.sleep(_LOOK_S)
        finally:
            for task in self._work:
                task.cancel()
            await asyncio.gather(*self._work, return_exceptions=True)
            self._let_go()

    def counts(self) -> dict[str, int]:
        """How many are in each state here; those that this process works on alone."""
        found = [state.standing for state in self._states.values()]
        return {standing: found.count(standing) for standing in get_args(Standing)}

    def told(self) -> list[Told]:
        """How all stand, as the process that works on them wrote it. Reads a file."""
        if not self._declares:
            return []
        try:
            return [Told(*entry) for entry in json.loads(self._file.read_bytes())]
        except (OSError, ValueError, TypeError):
            return []

    def _failed(self) -> dict[str, str]:
        return {
            one.name: f"declared adapter {one.name!r}: {one.source}: {one.error}"
            for one in self.told()
            if one.state == "failed"
        }

    @property
    def _declares(self) -> bool:
        declared = self._configuration
        return bool(declared.adapters or declared.adapters_folder or declared.prune_adapters)

    @property
    def _file(self) -> Path:
        return self._folder / "state.json"

    async def _look(self) -> None:
        """Raises OSError, and StoreError of a removal."""
        declared = self._configuration
        before, self._seen = self._seen, None
        if not self._declares:
            self._states.clear()
            self._let_go()
            return
        if not await asyncio.to_thread(self._take):
            return
        reloads = self._reloads
        wanted = {each.name: (parse(each.source), each.watch) for each in declared.adapters}
        unread: OSError | None = None
        if declared.adapters_folder is not None:
            try:
                folder = Path(declared.adapters_folder)
                found = await self._adapters.sources.in_thread(folder, partial(_subfolders, folder))
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
        self._begin(
            (n for n, state in self._states.items() if self._is_due(state, reloads)), reloads
        )
        self._begin(await self._changed(reloads), reloads)
        await asyncio.to_thread(self._write)
        if unread is not None:
            raise unread
        self._seen = reloads, frozenset(wanted)
        if declared.prune_adapters and self._seen == before != self._pruned:
            await self._prune(wanted.keys())
            self._pruned = self._seen

    def _begin(self, names: Iterable[str], reloads: int) -> None:
        for name in names:
            state = self._states[name]
            state.working = True
            task = asyncio.create_task(self._bring(name, state, reloads))
            self._work.add(task)
            task.add_done_callback(self._work.discard)

    def _is_due(self, state: _State, reloads: int) -> bool:
        if state.working:
            return False
        return state.loaded_for != reloads or (
            bool(state.error) and self._clock() >= state.retry_at
        )

    async def _changed(self, reloads: int) -> list[str]:
        """Of what is watched and was loaded. Raises `SourceUnavailable` where a disk hangs."""
        watched = {
            name: state
            for name, state in self._states.items()
            if state.watch and not (state.working or state.error) and state.loaded_for == reloads
        }
        stamps = await self._adapters.sources.glimpse(each.source for each in watched.values())
        changed = []
        for (name, state), stamp in zip(watched.items(), stamps, strict=True):
            # Changed, and left alone since the last look: whoever writes it may have ended. Where
            # it has gone its name stays.
            if stamp is not None and stamp == state.glimpsed != state.stamp:
                changed.append(name)
            state.glimpsed = stamp or ()
        return changed

    async def _bring(self, name: str, state: _State, reloads: int) -> None:
        try:
            await self._load(name, state)
        except (AdapterError, StoreError, GatewayError, OSError) as error:
            if state.error != str(error):
                log.error("declared adapter %r: %s: %s", name, state.source, error)
            state.error = str(error)
            state.failures += 1
            wait_s = min(_LAST_RETRY_S, _FIRST_RETRY_S * 2.0 ** min(state.failures - 1, 20))
            state.retry_at = self._clock() + wait_s
        except Exception as error:  # one of them must not stop the others
            log.exception("declared adapter %r cannot be loaded", name)
            state.error, state.retry_at = repr(error), self._clock() + _LAST_RETRY_S
        else:
            state.error, state.failures = "", 0
        state.loaded_for = reloads
        state.working = False

    async def _load(self, name: str, state: _State) -> None:
        sources = self._adapters.sources
        if state.stamp and await sources.look(state.source, trusted=True) == state.stamp:
            return
        # One at a time for each place: a slow one keeps none but its own waiting.
        who = f"{DECLARED} {state.source.scheme}://{state.source.place}"
        async with sources.fetched(state.source, who, trusted=True) as found:
            if self._states.get(name) is not state:
                return  # nobody declares that any more
            digest = await self._adapters.declare(
                name, found.folder, found.within, str(state.source)
            )
        if digest != state.digest:
            log.info("declared adapter %r: %s is version %s", name, state.source, digest[:12])
        state.stamp, state.digest = found.stamp, digest

    async def _prune(self, wanted: Collection[str]) -> None:
        """Removes what came by a declaration alone and is declared no more.

        Only when what is declared has changed, so that a gateway with an older list does not remove
        what others have just added. And only when two looks in a row have found the same: while a
        folder is replaced by another there is none of its name for a moment.
        """
        for record in self._adapters.records:
            ours = all(version.added_by == DECLARED for version in record.versions)
            if ours and record.name not in wanted:
                await self._adapters.remove(record.name)
                log.warning("adapter %r was removed: it is declared no more", record.name)

    def _take(self) -> bool:
        """Whether this process does the work, from now on."""
        if not self._lock.held:
            self._folder.mkdir(parents=True, exist_ok=True)
        return self._lock.take()

    def _let_go(self) -> None:
        if self._lock.held:
            self._lock.let_go()
            self._written = ""

    def _write(self) -> None:
        entries = [
            Told(name, str(state.source), state.standing, state.digest, state.error)
            for name, state in sorted(self._states.items())
        ]
        text = json.dumps(entries)
        if text != self._written:
            new = self._file.with_suffix(".new")
            new.write_text(text, encoding="utf-8")
            new.replace(self._file)
            self._written = text


def _subfolders(folder: Path) -> Iterator[tuple[str, Source]]:
    """Each subfolder that is named as an adapter can be. Raises OSError.

    A folder without any is more likely a volume that is not there, or is new and has but its
    ``lost+found``, than a wish to have no adapters.
    """
    found = sorted(path for path in folder.iterdir() if os.path.isdir(path))
    if len(found) > _MOST_FOLDERS:
        raise OSError(f"{folder} has {len(found)} folders; at most {_MOST_FOLDERS} are adapters")
    names = []
    for path in found:
        try:
            names.append((check_name(path.name), Source("file", "", path.absolute().parts[1:])))
        except InvalidName as error:
            log.debug("%s is no adapter: %s", path, error)
    if not names:
        raise OSError(f"{folder} has no folder that is named as an adapter can be")
    return iter(names)

"""Brings an adapter's files from where they are to a folder, within bounds of size and time.

It works in a thread with an event loop of its own: what a slow or endless server costs, it costs
there, and a request that waits for it can be given up at any moment.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from adapters import chat_template, npy_files, peft, tokenizer_config
from adapters.errors import (
    AdapterError,
    CorruptFile,
    MissingFile,
    SourceNotAllowed,
    SourceUnavailable,
    TooLarge,
    store_errors,
)
from gateway.sources import disk
from gateway.sources.source import Source

if TYPE_CHECKING:
    from gateway.sources.remote import Found, Place

T = TypeVar("T")

_MiB = 1024 * 1024
# Of files beside the weights, which are read whole. Whoever reads them has bounds of its own.
_MOST = {peft.CONFIG: 4 * _MiB, tokenizer_config.FILE: 4 * _MiB, chat_template.FILE: _MiB}
FILES = (peft.CONFIG, peft.WEIGHTS, tokenizer_config.FILE, chat_template.FILE)
"""All that is ever asked for at a place on another machine; the first two must be there."""
# Folders that processes have left behind which were killed: any fetch is over sooner.
_LEFT_S = 86400.0
_DISK_THREADS = 4
_NEEDED = " and ".join(FILES[:2])
_INCOMING = "the folder for adapters that are being fetched"

Stamp = tuple[object, ...]
"""Equal while the content of a source is; () where that cannot be told."""


class Fetched(NamedTuple):
    """A folder with the files, all of which must lie `within`; until the context closes."""

    folder: Path
    within: Path
    stamp: Stamp


class Sources:
    """Where this process may fetch adapters from, and the thread in which it does."""

    def __init__(
        self,
        incoming: Path,
        allowed: Iterable[Source],
        *,
        root: Path | None,
        max_bytes: int,
        timeout_s: float,
    ) -> None:
        """`incoming` holds what is being fetched; `root` has folders that may be read as well.

        `max_bytes` is the limit of the weights, `timeout_s` that of a whole fetch.
        """
        self._incoming = incoming
        self._allowed = tuple(allowed)
        self._root = root
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s
        self._loop: asyncio.AbstractEventLoop | None = None
        self._threads = ThreadPoolExecutor(_DISK_THREADS, "sources-disk")
        self._turns: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    def check(self, source: Source) -> None:
        """Raises `SourceNotAllowed` for what no request may name."""
        if source.scheme == "file" and self._root is not None:
            return  # `folder_of` looks
        if not source.is_allowed(self._allowed):
            raise SourceNotAllowed(
                *("request", "source", str(source), "what GATEWAY_ADAPTER_SOURCES lists"),
            )

    async def look(self, source: Source, *, trusted: bool = False) -> Stamp:
        """What tells the source's content of now from another. Raises as `fetched` does."""
        if source.scheme in ("file", "hf"):
            _, stamp = await self.in_thread(source, partial(self._stamped, source, trusted))
            return stamp
        return await self._in_time(source, self._look(source, trusted))

    async def glimpse(self, sources: Iterable[Source]) -> list[Stamp | None]:
        """`look` at many that the operator named on this machine; None for what is not there.

        Raises `SourceUnavailable`.
        """

        def stamps() -> list[Stamp | None]:
            return [self._stamp_if_there(source) for source in known]

        known = list(sources)
        return await self.in_thread("watched folders", stamps) if known else []

    @asynccontextmanager
    async def fetched(
        self, source: Source, who: str, *, trusted: bool = False
    ) -> AsyncIterator[Fetched]:
        """The files of a source. One at a time for each of `who`.

        `trusted` says that the operator named it, not a request. What is on this machine is read
        where it lies. Raises `SourceNotAllowed`, `SourceUnavailable`, `MissingFile`, `TooLarge`,
        `CorruptFile`, and `StoreError` where there is no room for it.
        """
        if not trusted:
            self.check(source)
        if source.scheme in ("file", "hf"):
            stamped = partial(self._stamped, source, trusted)
            on_disk, stamp = await self.in_thread(source, stamped)
            yield Fetched(*on_disk, stamp)
            return
        async with self._turns[who]:
            with store_errors(_INCOMING):
                folder = await asyncio.to_thread(self._new_folder)
            try:
                stamp = await self._in_time(source, self._fetch(source, folder, trusted))
                yield Fetched(folder, folder, stamp)
            finally:
                await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._loop = None

    async def in_thread(self, source: object, work: Callable[[], T]) -> T:
        """Does `work` on a disk, whose hanging keeps none of the threads that all others need.

        Raises `SourceUnavailable` after the time that a source has.
        """
        loop = asyncio.get_running_loop()
        return await self._until(source, loop.run_in_executor(self._threads, work))

    async def _in_time(self, source: Source, work: Coroutine[Any, Any, T]) -> T:
        """Does `work` in the other loop, where it is cancelled when whoever waits here is."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            thread = threading.Thread(target=_run, args=(self._loop,), name="sources", daemon=True)
            thread.start()
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        return await self._until(source, asyncio.wrap_future(future))

    async def _until(self, source: object, work: asyncio.Future[T]) -> T:
        try:
            async with asyncio.timeout(self._timeout_s):
                return await work
        except TimeoutError:
            limit = f"an answer within {self._timeout_s:g} s"
            raise SourceUnavailable("request", "source", str(source), limit) from None

    async def _look(self, source: Source, trusted: bool) -> Stamp:
        # It imports what takes a tenth of a gateway's start.
        from gateway.sources import remote  # noqa: PLC0415

        async with remote.opened(source, partial(self._may_lead_to, source, trusted)) as place:
            return _told(source, [await place.look(name) for name in FILES])

    async def _fetch(self, source: Source, folder: Path, trusted: bool) -> Stamp:
        from gateway.sources import remote  # noqa: PLC0415

        async with remote.opened(source, partial(self._may_lead_to, source, trusted)) as place:
            found = {name: await place.look(name) for name in FILES}
            for name, file in found.items():
                if file is None and name in FILES[:2]:
                    says = f"there is no such file at {source}; an adapter needs {_NEEDED}"
                    raise MissingFile(name, "source", "not there", name, says=says)
                if file is not None and (file.size or 0) > self._most(name):
                    raise _too_large(name, f"{file.size}", self._most(name))
            for name, file in found.items():
                if file is not None:
                    await self._receive(place, name, file, folder / name)
            # A release that came meanwhile: some files may be of it, and some of the one before.
            for name, file in found.items():
                if await place.look(name) != file:
                    raise remote.unavailable(name, "another than when the fetch began", "the same")
        return _told(source, found.values())

    async def _receive(self, place: Place, name: str, file: Found, path: Path) -> None:
        """Raises `TooLarge` with the first byte too many, `CorruptFile` where it is not as told."""
        size = 0
        # This loop serves nobody: a write may take its time here.
        with store_errors(_INCOMING), path.open("xb") as written:
            async with aclosing(place.read(name)) as pieces:
                async for piece in pieces:
                    size += len(piece)
                    if size > self._most(name):
                        raise _too_large(name, f"more than {self._most(name)}", self._most(name))
                    written.write(piece)
        if file.size is not None and file.size != size:
            raise CorruptFile(name, "size", f"{size} bytes", f"the {file.size} that were told")

    def _most(self, name: str) -> int:
        return _MOST.get(name, self._max_bytes)

    def _may_lead_to(self, source: Source, trusted: bool, target: Source) -> bool:
        """A redirect may lead to what is allowed, and at the place that the operator named."""
        return target.is_allowed(self._allowed) or (trusted and target.place == source.place)

    def _on_disk(self, source: Source, trusted: bool) -> disk.OnDisk:
        if source.scheme == "hf":
            return disk.snapshot_of(source, disk.hub_cache(), self._root)
        below = [Path(str(each)) for each in self._allowed if each.scheme == "file"]
        if self._root is not None:
            below.append(self._root)
        return disk.folder_of(source, None if trusted else below)

    def _stamped(self, source: Source, trusted: bool) -> tuple[disk.OnDisk, Stamp]:
        on_disk = self._on_disk(source, trusted)
        return on_disk, stamp_of(on_disk.folder)

    def _stamp_if_there(self, source: Source) -> Stamp | None:
        try:
            return self._stamped(source, True)[1]
        except AdapterError:
            return None

    def _new_folder(self) -> Path:
        self._incoming.mkdir(parents=True, exist_ok=True)
        for left in self._incoming.iterdir():
            with suppress(FileNotFoundError):  # the fetch that it was for has just ended
                if time.time() - left.stat().st_mtime > _LEFT_S:
                    shutil.rmtree(left, ignore_errors=True)
        return Path(tempfile.mkdtemp(dir=self._incoming))


def _run(loop: asyncio.AbstractEventLoop) -> None:
    """Until it is stopped; what is not done then is cancelled."""

    async def end() -> None:
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        await loop.shutdown_asyncgens()

    try:
        loop.run_forever()
        loop.run_until_complete(end())
    finally:
        loop.close()


def _told(source: Source, found: Iterable[Found | None]) -> Stamp:
    known = tuple(found)
    untold = any(each is not None and not each.tag for each in known)
    return () if untold else (str(source), *known)


def stamp_of(folder: Path) -> Stamp:
    """What changes when a file of an adapter, of any form, is replaced or written to. Blocks."""

    def status(name: str) -> object:
        try:
            return peft.file_identity((folder / name).stat())
        except OSError:
            return None

    return (str(folder), *map(status, (*FILES, *npy_files.ALL)))


def _too_large(name: str, found: str, most: int) -> TooLarge:
    return TooLarge(name, "size", f"{found} bytes", f"{most} bytes")

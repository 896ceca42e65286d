"""Fetching of an adapter's files from a source, with limits of file size and time.

Remote sources are read in a separate thread with its own event loop. Downloads therefore do not
delay the event loop that serves requests, and a request that waits for a download can be cancelled
at any moment.

See decision 031 in docs/decisions.
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
    from gateway.sources.remote import RemoteFile, RemoteLocation

T = TypeVar("T")

_MiB = 1024 * 1024
# Maximum size in bytes of each file except the weights file. These files are read into memory.
_MAX_FILE_BYTES = {peft.CONFIG: 4 * _MiB, tokenizer_config.FILE: 4 * _MiB, chat_template.FILE: _MiB}
FILES = (peft.CONFIG, peft.WEIGHTS, tokenizer_config.FILE, chat_template.FILE)
"""Files that are requested from a remote source. The first two files must exist."""
# Age in seconds at which a folder of downloaded files is removed. A fetch takes much less time, so
# such an old folder was left by a process that was killed.
_LEFTOVER_AGE_S = 86400.0
_DISK_THREADS = 4
_NEEDED = " and ".join(FILES[:2])
_INCOMING = "the folder for adapters that are being fetched"

Stamp = tuple[object, ...]
"""Value that identifies the content of an adapter's files. It changes when a file changes.

The value is () if, for at least one file, a server sends neither an ETag nor a modification date.
"""


class FetchedFiles(NamedTuple):
    """A folder with the files of a source. It exists until the context of `fetch` ends.

    Attributes:
        folder: the folder.
        within: folder in which all files must be, also the targets of symbolic links.
        stamp: identification of the content; see `Stamp`.
    """

    folder: Path
    within: Path
    stamp: Stamp


class Sources:
    """Fetcher of adapter files from folders, servers and buckets.

    This class owns the threads that read disks and download files.
    """

    def __init__(
        self,
        incoming: Path,
        allowed: Iterable[Source],
        *,
        root: Path | None,
        max_bytes: int,
        timeout_s: float,
    ) -> None:
        """Create the fetcher.

        Args:
            incoming: folder for downloaded files.
            allowed: prefixes of the sources that requests may use.
            root: folder whose subfolders requests may use, in addition to `allowed`. None if there
                is no such folder.
            max_bytes: maximum size of the weights file.
            timeout_s: maximum duration of one fetch in seconds.
        """
        self._incoming = incoming
        self._allowed = tuple(allowed)
        self._root = root
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s
        self._loop: asyncio.AbstractEventLoop | None = None
        self._threads = ThreadPoolExecutor(_DISK_THREADS, "sources-disk")
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    def check(self, source: Source) -> None:
        """Raise `SourceNotAllowed` if requests may not use this source."""
        if source.scheme == "file" and self._root is not None:
            return  # `find_folder` checks the folder later
        if not source.is_allowed(self._allowed):
            raise SourceNotAllowed(
                *("request", "source", str(source), "what GATEWAY_ADAPTER_SOURCES lists"),
            )

    async def read_stamp(self, source: Source, *, trusted: bool = False) -> Stamp:
        """Return the stamp of the current files of a source. Raise the same errors as `fetch`.

        `trusted` is True if the source comes from the configuration, not from a request.
        """
        if source.scheme in ("file", "hf"):
            _, stamp = await self.in_thread(
                source, partial(self._find_stamped_folder, source, trusted)
            )
            return stamp
        return await self._run_remote(source, self._read_remote_stamp(source, trusted))

    async def read_stamps(self, sources: Iterable[Source]) -> list[Stamp | None]:
        """Return the stamps of local sources in the same order, with None for a missing source.

        All sources must come from the configuration, because this method does not check if requests
        may use them. Raise `SourceUnavailable` if a disk does not respond in time.
        """

        def stamps() -> list[Stamp | None]:
            return [self._read_stamp_or_none(source) for source in known]

        known = list(sources)
        return await self.in_thread("watched folders", stamps) if known else []

    @asynccontextmanager
    async def fetch(
        self, source: Source, who: str, *, trusted: bool = False
    ) -> AsyncIterator[FetchedFiles]:
        """Return a context manager that provides the files of a source.

        Local files are used without a copy.

        Args:
            source: the source.
            who: name of the caller. Calls with the same name download their files one after the
                other.
            trusted: True if the source comes from the configuration, not from a request. A trusted
                source need not be in the list of allowed sources.

        Raises:
            SourceNotAllowed: requests may not use this source.
            SourceUnavailable: the source cannot be read, or does not respond in time.
            MissingFile: a required file does not exist.
            TooLarge: a file exceeds its size limit.
            CorruptFile: a file's size differs from the size that the server announced.
            StoreError: the local disk is full or fails.
        """
        if not trusted:
            self.check(source)
        if source.scheme in ("file", "hf"):
            stamped = partial(self._find_stamped_folder, source, trusted)
            on_disk, stamp = await self.in_thread(source, stamped)
            yield FetchedFiles(*on_disk, stamp)
            return
        async with self._locks[who]:
            with store_errors(_INCOMING):
                folder = await asyncio.to_thread(self._make_folder)
            try:
                stamp = await self._run_remote(source, self._fetch_remote(source, folder, trusted))
                yield FetchedFiles(folder, folder, stamp)
            finally:
                await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._loop = None

    async def in_thread(self, source: object, work: Callable[[], T]) -> T:
        """Run `work` in a thread for disk access, and return its result.

        If a disk does not respond, only these threads are blocked, and all other work continues.
        Raise `SourceUnavailable` after the timeout; the message names `source`.
        """
        loop = asyncio.get_running_loop()
        return await self._wait_in_time(source, loop.run_in_executor(self._threads, work))

    async def _run_remote(self, source: Source, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` in the event loop for downloads, and return its result.

        If the caller of this method is cancelled, `work` is cancelled, too.
        """
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            thread = threading.Thread(
                target=_run_loop, args=(self._loop,), name="sources", daemon=True
            )
            thread.start()
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        return await self._wait_in_time(source, asyncio.wrap_future(future))

    async def _wait_in_time(self, source: object, work: asyncio.Future[T]) -> T:
        try:
            async with asyncio.timeout(self._timeout_s):
                return await work
        except TimeoutError:
            limit = f"an answer within {self._timeout_s:g} s"
            raise SourceUnavailable("request", "source", str(source), limit) from None

    async def _read_remote_stamp(self, source: Source, trusted: bool) -> Stamp:
        # Import here, because this import takes 10 % of the gateway's start time.
        from gateway.sources import remote  # noqa: PLC0415

        async with remote.open_location(
            source, partial(self._may_redirect_to, source, trusted)
        ) as location:
            return _build_stamp(source, [await location.stat(name) for name in FILES])

    async def _fetch_remote(self, source: Source, folder: Path, trusted: bool) -> Stamp:
        from gateway.sources import remote  # noqa: PLC0415

        async with remote.open_location(
            source, partial(self._may_redirect_to, source, trusted)
        ) as location:
            found = {name: await location.stat(name) for name in FILES}
            for name, file in found.items():
                if file is None and name in FILES[:2]:
                    says = f"there is no such file at {source}; an adapter needs {_NEEDED}"
                    raise MissingFile(name, "source", "not there", name, says=says)
                if file is not None and (file.size or 0) > self._max_bytes_of(name):
                    raise _too_large_error(name, f"{file.size}", self._max_bytes_of(name))
            for name, file in found.items():
                if file is not None:
                    await self._receive(location, name, file, folder / name)
            # Check that no file has changed during the fetch. If a new version of the adapter was
            # published meanwhile, the fetched files may be a mix of both versions.
            for name, file in found.items():
                if await location.stat(name) != file:
                    raise remote.unavailable_error(
                        name, "another than when the fetch began", "the same"
                    )
        return _build_stamp(source, found.values())

    async def _receive(
        self, location: RemoteLocation, name: str, file: RemoteFile, path: Path
    ) -> None:
        """Download one file to `path`.

        Raise `TooLarge` as soon as the size limit is exceeded. Raise `CorruptFile` if the size
        differs from the announced size.
        """
        size = 0
        # Write in this event loop, which may block because it serves no requests.
        with store_errors(_INCOMING), path.open("xb") as written:
            async with aclosing(location.read(name)) as pieces:
                async for piece in pieces:
                    size += len(piece)
                    if size > self._max_bytes_of(name):
                        raise _too_large_error(
                            name, f"more than {self._max_bytes_of(name)}", self._max_bytes_of(name)
                        )
                    written.write(piece)
        if file.size is not None and file.size != size:
            raise CorruptFile(
                name, "size", f"{size} bytes", f"the {file.size} that the source announced"
            )

    def _max_bytes_of(self, name: str) -> int:
        return _MAX_FILE_BYTES.get(name, self._max_bytes)

    def _may_redirect_to(self, source: Source, trusted: bool, target: Source) -> bool:
        """Return True if a redirect from `source` to `target` may be followed.

        `target` must be an allowed source. If `source` is trusted, `target` may also be any source
        on the same host.
        """
        return target.is_allowed(self._allowed) or (
            trusted and target.authority == source.authority
        )

    def _find_folder(self, source: Source, trusted: bool) -> disk.LocalFolder:
        if source.scheme == "hf":
            return disk.find_snapshot(source, disk.find_hub_cache(), self._root)
        below = [Path(str(each)) for each in self._allowed if each.scheme == "file"]
        if self._root is not None:
            below.append(self._root)
        return disk.find_folder(source, None if trusted else below)

    def _find_stamped_folder(self, source: Source, trusted: bool) -> tuple[disk.LocalFolder, Stamp]:
        on_disk = self._find_folder(source, trusted)
        return on_disk, stamp_of(on_disk.folder)

    def _read_stamp_or_none(self, source: Source) -> Stamp | None:
        try:
            return self._find_stamped_folder(source, True)[1]
        except AdapterError:
            return None

    def _make_folder(self) -> Path:
        self._incoming.mkdir(parents=True, exist_ok=True)
        for left in self._incoming.iterdir():
            with suppress(FileNotFoundError):  # another fetch may have just removed its folder
                if time.time() - left.stat().st_mtime > _LEFTOVER_AGE_S:
                    shutil.rmtree(left, ignore_errors=True)
        return Path(tempfile.mkdtemp(dir=self._incoming))


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    """Run the event loop until it is stopped. Then cancel its remaining tasks and close it."""

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


def _build_stamp(source: Source, found: Iterable[RemoteFile | None]) -> Stamp:
    known = tuple(found)
    untold = any(each is not None and not each.tag for each in known)
    return () if untold else (str(source), *known)


def stamp_of(folder: Path) -> Stamp:
    """Return the stamp of an adapter's folder. The stamp identifies the content of its files.

    The stamp changes when any of the adapter's files is replaced or written to. This function
    blocks.
    """

    def status(name: str) -> object:
        try:
            return peft.file_identity((folder / name).stat())
        except OSError:
            return None

    return (str(folder), *map(status, (*FILES, *npy_files.ALL)))


def _too_large_error(name: str, found: str, most: int) -> TooLarge:
    return TooLarge(name, "size", f"{found} bytes", f"{most} bytes")

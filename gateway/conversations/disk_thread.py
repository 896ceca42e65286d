"""Asynchronous access to the conversations on disk (`ConversationDisk`), through one thread.

Failures of the disk are logged and counted.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from gateway.conversations.disk import ConversationDisk, ForeignFile
from gateway.conversations.stats import ConversationStats

log = logging.getLogger(__name__)

T = TypeVar("T")

DISK_ERRORS = (OSError, sqlite3.Error, ForeignFile)


class DiskUnavailable(Exception):
    """The disk of this gateway cannot store conversations now."""


class DiskThread:
    """Thread that runs the methods of `ConversationDisk`. Call `open` first.

    If the SQLite file is damaged or has an unknown layout, the file is not used again until the
    process is restarted. After any other failure, such as a full disk, the next call uses the file
    again, and opens it first if it is not open.
    """

    def __init__(
        self, folder: Path, make: Callable[[], ConversationDisk], stats: ConversationStats
    ) -> None:
        self._folder = folder
        self._make = make
        self._stats = stats
        self._disk: ConversationDisk | None = None
        self._is_disabled = False
        self._is_failing = False
        self._reason = ""
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="conversations")

    async def open(self) -> None:
        with suppress(DiskUnavailable):
            await self.run(lambda _: None)

    async def close(self) -> None:
        if self._disk is not None:
            await self._in_thread(self._disk.close)
        await asyncio.to_thread(self._thread.shutdown)

    async def run(self, work: Callable[[ConversationDisk], T]) -> T:
        """Run `work` in the thread, and return its result.

        Raise DiskUnavailable if `work` fails because of the disk. Also raise it if an earlier call
        has found that the file is damaged or has an unknown layout.
        """
        if self._is_disabled:
            raise DiskUnavailable
        try:
            result = await self._in_thread(lambda: work(self._open_disk()))
        except DISK_ERRORS as error:
            # Disable the disk only for the exact type DatabaseError (a damaged file) and
            # ForeignFile. Subclasses such as OperationalError (full disk, locked file) are
            # temporary.
            self._is_disabled |= type(error) in (sqlite3.DatabaseError, ForeignFile)
            self._record_failure(error)
            raise DiskUnavailable from error
        if self._is_failing:
            self._is_failing = False
            log.info("conversations are stored in %s again", self._folder)
        return result

    def _open_disk(self) -> ConversationDisk:
        """Return the open SQLite file. Open the file if it is not open. Runs in the thread."""
        if self._disk is None:
            self._disk = self._make()
        return self._disk

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    @property
    def problem(self) -> str:
        """Message for operators if nothing can be stored on disk now; "" if the disk works."""
        return (
            f"conversations are not stored in {self._folder} now: {self._reason}" * self._is_failing
        )

    def _record_failure(self, error: BaseException) -> None:
        self._reason = str(error)
        self._stats.disk_failures += 1
        if not self._is_failing:
            self._is_failing = True
            log.error("conversations are not stored in %s now: %s", self._folder, error)

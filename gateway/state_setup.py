"""Creation of the objects of a process that keep state in the database."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import NamedTuple

from gateway.config.file import ConfigurationError
from gateway.config.settings import Settings
from gateway.database.changes import ChangeFeed
from gateway.database.database import Database, InvalidUrl, SchemaMismatch
from gateway.database.opening import make_database, sqlite_file
from gateway.database.sharing import Sharing
from gateway.former_state.move import FormerState
from gateway.metrics.metrics import Metrics
from gateway.overrides import rows as override_rows
from gateway.overrides.live import LiveOverrides
from gateway.scheduling.replicas import Replicas
from gateway.tenancy.access import Access
from gateway.tenancy.keys import rows as key_rows
from gateway.tenancy.keys.issued import IssuedKeys
from gateway.tenancy.limits.totals import BudgetTotals
from gateway.tenancy.usage_rows import UsageRows

log = logging.getLogger(__name__)


class DatabaseState(NamedTuple):
    """The database, and the objects whose state it has; see `Service` for each of them."""

    database: Database
    sharing: Sharing
    changes: ChangeFeed
    keys: IssuedKeys | None
    overrides: LiveOverrides
    totals: BudgetTotals
    usage_rows: UsageRows | None


def check_database(settings: Settings) -> None:
    """Raise ConfigurationError if `open_state` would. Do nothing if the database is unavailable.

    Call this before worker processes start: it upgrades the schema of SQLite.
    """

    async def check() -> None:
        database = await _open_database(settings)
        await database.close()

    asyncio.run(check())


async def _open_database(settings: Settings) -> Database:
    url = settings.database_url
    database = make_database(
        settings.store_dir,
        None if url is None else url.get_secret_value(),
        connections=settings.database_connections,
        timeout_s=settings.database_timeout,
    )
    try:
        await database.open()
    except (SchemaMismatch, InvalidUrl) as error:
        await database.close()
        setting = "GATEWAY_STORE_DIR" if url is None else "GATEWAY_DATABASE_URL"
        raise ConfigurationError(f"{setting}: {error}") from error
    return database


@asynccontextmanager
async def open_state(
    settings: Settings, access: Access, replicas: Replicas, metrics: Metrics
) -> AsyncIterator[DatabaseState]:
    """Open the database, and load the keys and overrides that admins have made.

    If the database is unavailable, they are loaded when it answers. Raise ConfigurationError if its
    URL is invalid, or if this release does not work with its schema.
    """
    database = await _open_database(settings)
    file = sqlite_file(settings.store_dir)
    log.info("database: %s", file if settings.database_url is None else "PostgreSQL")
    metrics.export_database(database)
    try:
        async with Sharing(
            database, settings.redis_url, ephemeral=settings.store_ephemeral
        ) as sharing:
            changes = ChangeFeed(database)
            move = partial(FormerState(settings.store_dir, settings.redis_url).move_once, database)
            overrides = LiveOverrides(database, sharing, replicas.set_overrides, move)
            changes.subscribe(override_rows.CHANGES, overrides.refresh)
            keys = None
            if settings.config is not None:
                keys = IssuedKeys(database, sharing, access, move)
                changes.subscribe(key_rows.CHANGES, keys.refresh)
            await changes.poll()
            totals = BudgetTotals(database)
            await totals.try_synchronize()
            usage_rows = None
            if settings.usage_rows_days is not None:
                usage_rows = UsageRows(database, settings.usage_rows_days, metrics.usage_lost.inc)
            try:
                yield DatabaseState(database, sharing, changes, keys, overrides, totals, usage_rows)
            finally:
                if usage_rows is not None:
                    await usage_rows.try_flush()
                await totals.try_synchronize()
                if keys is not None:
                    await keys.close()
    finally:
        await database.close()

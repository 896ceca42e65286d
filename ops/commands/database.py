"""`gateway database`: the schema of PostgreSQL, and the move of the former release's state."""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gateway.config.settings import StorageSettings
    from gateway.database.database import Database, Query

_UNAVAILABLE = 3
_UPGRADE_TIMEOUT_S = 24 * 3600.0  # an index of a large table takes its time
_SETTINGS = (
    "Settings are the gateway's: GATEWAY_DATABASE_URL, or GATEWAY_STORE_DIR for SQLite, and "
    "GATEWAY_REDIS_URL."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Creates and upgrades the tables of PostgreSQL. A gateway upgrades SQLite itself."
    )
    parser.epilog = _SETTINGS
    commands = parser.add_subparsers(dest="database_command", required=True, metavar="COMMAND")
    upgrade = commands.add_parser(
        "upgrade",
        help="create the tables, or change them as this release needs",
        description="Creates the tables, or changes them as this release needs. Gateways of the "
        "release before continue to work. Running it again changes nothing.",
        epilog=_SETTINGS,
    )
    upgrade.add_argument(
        "--if-available",
        action="store_true",
        help="succeed if the database is unavailable, as gateways then start, too",
    )
    move = commands.add_parser(
        "import",
        help="copy keys and overrides that the release before stored",
        description="Copies keys made over the API and overrides of replicas from the state folder "
        "and from Redis, where the release before stored them. Running it again changes nothing. "
        "Gateways do the same when they start.",
        epilog=_SETTINGS,
    )
    move.add_argument("--dry-run", action="store_true", help="show the counts, and change nothing")


def run(parsed: argparse.Namespace) -> int:
    """Run the subcommand, and return the exit code.

    The code is 1 after a failure, 2 if a setting is wrong, and 3 if the database is unavailable.
    """
    from gateway.config.environment import storage_settings_from_environment
    from gateway.config.file import ConfigurationError
    from gateway.database.opening import sqlite_file

    # The errors are printed here, so the log needs no lines.
    logging.getLogger("gateway").addHandler(logging.NullHandler())
    try:
        settings = storage_settings_from_environment()
    except ConfigurationError as error:
        print(f"gateway database: {error}", file=sys.stderr)
        return 2
    if parsed.database_command == "upgrade":
        if settings.database_url is None:
            text = "GATEWAY_DATABASE_URL is not set; a gateway upgrades SQLite itself"
            print(f"gateway database: {text}", file=sys.stderr)
            return 2
        code = asyncio.run(_upgrade(settings))
        return 0 if code == _UNAVAILABLE and parsed.if_available else code
    with tempfile.TemporaryDirectory() as empty:
        # Do not create the SQLite file in a dry run.
        has_none = settings.database_url is None and not sqlite_file(settings.store_dir).exists()
        folder = Path(empty) if parsed.dry_run and has_none else settings.store_dir
        return asyncio.run(_import(settings, folder, dry_run=parsed.dry_run))


async def _upgrade(settings: StorageSettings) -> int:
    from gateway.database.connection import Connection
    from gateway.database.migrate import VERSIONS, read_version, upgrade

    done: list[str] = []
    version = ""

    async def prepare(connection: Connection) -> None:
        nonlocal version
        done[:] = await upgrade(connection)
        version = await read_version(connection) or ""

    code = await _run(settings, settings.store_dir, _do_nothing, prepare, _UPGRADE_TIMEOUT_S)
    if code == 0:
        newer = f", newer than this release ({VERSIONS[-1]})" if version > VERSIONS[-1] else ""
        migrations = ", ".join(done) or "none"
        print(f"the schema has version {version}{newer}; migrations run: {migrations}")
    return code


async def _do_nothing(_: Database) -> int:
    return 0


async def _run(
    settings: StorageSettings,
    folder: Path,
    work: Callable[[Database], Awaitable[int]],
    prepare: Query[None] | None = None,
    timeout_s: float | None = None,
) -> int:
    from gateway.database.database import InvalidUrl, SchemaMismatch, read_identity
    from gateway.database.opening import make_database
    from gateway.errors import DatabaseUnavailable

    url = settings.database_url
    database = make_database(
        folder,
        None if url is None else url.get_secret_value(),
        connections=1,
        timeout_s=settings.database_timeout if timeout_s is None else timeout_s,
        prepare=prepare,
    )
    try:
        await database.open()
        await database.read(read_identity)  # raises DatabaseUnavailable if `open` could not connect
        return await work(database)
    except (SchemaMismatch, InvalidUrl) as error:
        print(f"gateway database: {error}", file=sys.stderr)
        return 1
    except DatabaseUnavailable as error:
        print(f"gateway database: {error.why}", file=sys.stderr)
        return _UNAVAILABLE if _is_silent(error.__cause__) else 1
    finally:
        await database.close()


def _is_silent(error: BaseException | None) -> bool:
    """Return True if no server answers, or if it is starting or ending (SQLSTATE 57P...)."""
    state = str(getattr(error, "sqlstate", ""))
    return isinstance(error, OSError | TimeoutError) or state.startswith("57P")


async def _import(settings: StorageSettings, folder: Path, *, dry_run: bool) -> int:
    from gateway.former_state.move import FormerState, RedisNotRead

    former = FormerState(settings.store_dir, settings.redis_url)

    async def move(database: Database) -> int:
        try:
            moved = await former.move(database, dry_run=dry_run)
        except RedisNotRead as error:
            print(f"gateway database: {error}", file=sys.stderr)
            return 1
        redis = "not set" if settings.redis_url is None else "read"
        print(f"state folder: {settings.store_dir}; GATEWAY_REDIS_URL: {redis}")
        verb = "would be copied" if dry_run else "copied"
        print(f"keys: {moved.keys} {verb}, {moved.known} were there already")
        print(f"overrides of replicas: {moved.overrides} {verb}")
        for problem in moved.problems:
            print(f"not copied: {problem}", file=sys.stderr)
        return 1 if moved.problems else 0

    return await _run(settings, folder, move)

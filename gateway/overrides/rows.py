"""Rows of the overrides of replicas, in the table `replica_overrides`."""

from __future__ import annotations

import logging

import orjson

from gateway.database.changes import raise_number
from gateway.database.connection import Connection
from gateway.errors import InvalidRequest
from gateway.scheduling.override import Override, Overrides, parse_override

log = logging.getLogger(__name__)

CHANGES = "overrides"
"""Name of the change number of the overrides."""
MAX_OVERRIDES = 1000
"""Maximum number of replicas that have an override."""


async def read_overrides(connection: Connection) -> Overrides:
    """Return all overrides by endpoint, without those that this release cannot read."""
    found: dict[str, Override] = {}
    for endpoint, value in await connection.fetch("SELECT endpoint, value FROM replica_overrides"):
        try:
            found[endpoint] = parse_override(orjson.loads(value))
        except ValueError as error:
            log.error("the override of %s in the database is ignored: %s", endpoint, error)
    return found


async def write_override(
    connection: Connection, endpoint: str, override: Override | None
) -> Overrides:
    """Set the override of a replica, or remove it with None. Return all overrides.

    Raise InvalidRequest if there would be too many.
    """
    # The change number is locked first, so that concurrent calls cannot exceed the maximum.
    await raise_number(connection, CHANGES)
    if override is None:
        await connection.fetch("DELETE FROM replica_overrides WHERE endpoint = $1", endpoint)
    else:
        await connection.fetch(
            "INSERT INTO replica_overrides (endpoint, value) VALUES ($1, $2)"
            " ON CONFLICT (endpoint) DO UPDATE SET value = excluded.value",
            *(endpoint, _to_json(override)),
        )
    found = await read_overrides(connection)
    if len(found) > MAX_OVERRIDES:
        raise InvalidRequest(
            f"found {MAX_OVERRIDES} overrides of replicas; allowed: {MAX_OVERRIDES}. Delete some."
        )
    return found


async def insert_overrides(connection: Connection, overrides: Overrides) -> None:
    """Set the overrides of replicas that have none."""
    await raise_number(connection, CHANGES)
    await connection.execute_many(
        "INSERT INTO replica_overrides (endpoint, value) VALUES ($1, $2) ON CONFLICT DO NOTHING",
        [(name, _to_json(each)) for name, each in overrides.items()],
    )


def _to_json(override: Override) -> str:
    return orjson.dumps(override.to_dict()).decode()

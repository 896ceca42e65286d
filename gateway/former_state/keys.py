"""Keys made over the API, as the release before stored them.

``@keys/keys.json``  file: a JSON list of the keys' records
``@keys/used.json``  file: the time of each key's last use in seconds since 1970, by id
``api_keys``         hash in Redis: each key's record as JSON, by id, and the field ``@revision``
``api_keys:used``    hash in Redis: the time of each key's last use, by id
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import orjson
from pydantic import ValidationError

from gateway.tenancy.keys.record import KeyRecord, join_records, merge_uses
from lora_store.redis_hashes import read_hash

KEYS, USED = "api_keys", "api_keys:used"
_REVISION = b"@revision"
_RECORDS_AT_ONCE = 256


class FormerKeys(NamedTuple):
    """Keys by id, the times of their last use, and what could not be read.

    Attributes:
        records: The keys, including revoked ones.
        uses: The time of each key's last use in seconds since 1970, by id.
        problems: An error text for each record that is invalid.
    """

    records: dict[str, KeyRecord]
    uses: dict[str, int]
    problems: list[str]


def read_keys(folder: Path, client: Any | None) -> FormerKeys:
    """Read the keys from the state folder, and from Redis if `client` is not None.

    If a key is revoked in one of them, it is revoked in the result. Raise the errors of Redis'
    client.
    """
    found = FormerKeys({}, {}, [])
    disk = folder / "@keys"
    try:
        listed = orjson.loads((disk / "keys.json").read_bytes())
        found = _add(found, [orjson.dumps(each) for each in listed], str(disk / "keys.json"))
    except FileNotFoundError:
        pass
    except (OSError, ValueError, TypeError) as error:
        found.problems.append(f"{disk / 'keys.json'}: {error}")
    uses = _parse_uses(disk / "used.json")
    if client is not None:
        stored = read_hash(client, KEYS, _RECORDS_AT_ONCE)
        stored.pop(_REVISION, None)
        found = _add(found, stored.values(), f"Redis, {KEYS}")
        shared = read_hash(client, USED, _RECORDS_AT_ONCE)
        uses = merge_uses(
            uses,
            {
                key_id.decode(errors="replace"): int(used)
                for key_id, used in shared.items()
                if used.isdigit() and len(used) <= 12
            },
        )
    return found._replace(uses={name: when for name, when in uses.items() if name in found.records})


def _add(found: FormerKeys, raw: Iterable[bytes], where: str) -> FormerKeys:
    records: list[KeyRecord] = []
    for each in raw:
        try:
            record = KeyRecord.model_validate_json(each)
            if "\0" in record.tenant:  # PostgreSQL's text cannot contain NUL
                found.problems.append(f"{where}: the tenant of {record.id} contains NUL")
            else:
                records.append(record)
        except ValidationError as error:
            # Do not quote the record: a hash of a key is nothing for a log.
            found.problems.append(f"{where}: {error.error_count()} fields of a key are invalid")
    return found._replace(records=join_records(found.records, records))


def _parse_uses(file: Path) -> dict[str, int]:
    """Return the times in the file; {} if it cannot be read, because they are not essential."""
    try:
        uses = orjson.loads(file.read_bytes())
        return {str(name): int(when) for name, when in uses.items() if 0 <= when < 2**40}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}

"""Weights and drains that admins have set, as the release before stored them.

``@replicas/overrides.json``  file: a JSON object with each override, by the replica's endpoint
``replica_overrides``         hash in Redis: JSON of each override, by endpoint, and the field
                              ``@revision``. With Redis, the file is a copy of the hash.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson

from gateway.scheduling.override import Override, parse_override
from lora_store.redis_hashes import read_hash

KEY = "replica_overrides"
_REVISION = b"@revision"


def read_overrides(folder: Path, client: Any | None) -> tuple[dict[str, Override], list[str]]:
    """Read the overrides, by endpoint, and return them with an error text for each invalid one.

    They are read from Redis if `client` is not None and Redis has them, else from the state folder.
    Raise the errors of Redis' client.
    """
    stored = {} if client is None else read_hash(client, KEY)
    problems: list[str] = []
    if stored:
        stored.pop(_REVISION, None)
        raw = {name.decode(errors="replace"): value for name, value in stored.items()}
    else:
        raw = _read_file(folder / "@replicas" / "overrides.json", problems)
    found: dict[str, Override] = {}
    for endpoint, value in raw.items():
        try:
            if "\0" in endpoint:  # PostgreSQL's text cannot contain NUL
                raise ValueError("the endpoint contains NUL")
            found[endpoint] = parse_override(orjson.loads(value))
        except ValueError as error:
            problems.append(f"the override of {endpoint}: {error}")
    return found, problems


def _read_file(file: Path, problems: list[str]) -> dict[str, bytes]:
    try:
        facts = orjson.loads(file.read_bytes())
        return {str(name): orjson.dumps(value) for name, value in facts.items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, AttributeError) as error:
        problems.append(f"{file}: {error}")
        return {}

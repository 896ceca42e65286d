"""Entry of the configuration file for a tenant, and functions that create and hash API keys."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from gateway.config.limits import LIMITS, Counted, LimitName
from guides.kinds import Policy

KEY_PREFIX = "sk-"
_KEY_BYTES = 32

KeyHash = Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$")]
"""Hash of a key: ``sha256:`` and the hex digest.

The hash has no salt. A salt protects only keys that can be guessed, but a key has 256 random bits.
"""

Limit = Annotated[int, Field(ge=1, le=10**12)]


class Tenant(BaseModel):
    """An entry of `tenants` in the configuration file. A limit that is None does not apply.

    Adapters called `NAME/...` belong to the tenant `NAME`, who may always use them. Another tenant
    may use them only if a pattern in its `models` contains a slash and matches.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    name: str = Field(
        pattern=r"^[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}$",
        description="Unique name, as in logs, metrics and the names of the tenant's adapters.",
    )
    keys: list[KeyHash] = Field(
        description="Hashes of the tenant's keys, as `gateway key new` prints them. With an empty "
        "list, only keys made over the API admit the tenant."
    )
    models: list[Annotated[str, Field(min_length=1, max_length=256)]] = Field(
        description="Models that the tenant may use: exact names and patterns (`*`, `?`, `[...]`). "
        "A pattern without a slash matches no `TENANT/NAME`."
    )
    requests_per_minute: Limit | None = Field(
        default=None, description="Requests within any 60 seconds."
    )
    tokens_per_minute: Limit | None = Field(
        default=None, description="Prompt and output tokens within any 60 seconds."
    )
    concurrent_requests: Limit | None = Field(
        default=None, description="Choices, prompts and beams that run at once."
    )
    tokens_per_day: Limit | None = Field(
        default=None,
        description="Prompt and output tokens of a calendar day in UTC. It needs "
        "GATEWAY_REDIS_URL.",
    )
    tokens_per_month: Limit | None = Field(
        default=None,
        description="Prompt and output tokens of a calendar month in UTC. It needs "
        "GATEWAY_REDIS_URL.",
    )
    max_output_tokens: Limit | None = Field(
        default=None,
        description="Output tokens of a choice. A request for more is refused; a request that "
        "states no limit gets this one.",
    )
    priority: int = Field(
        default=0,
        ge=-100,
        le=100,
        description="Priority in the queue: requests of the greatest go first.",
    )
    first_token_within: float | None = Field(
        default=None,
        gt=0,
        allow_inf_nan=False,
        description="Seconds until the first token. A queued request that is not expected to have "
        "its first token by then is refused at once.",
    )
    guides: Policy = Field(
        default="checked",
        description="Handling of schemas, expressions and grammars. `checked`: compiled before an "
        "engine gets them. `unchecked`: sent unchanged; one that the engine cannot compile ends "
        "all running requests. `none`: refused.",
    )

    @cached_property
    def request_limits(self) -> Mapping[LimitName, int]:
        """The tenant's limits that count requests or slots, by name."""
        return self._limits("requests", "slots")

    @cached_property
    def slot_limits(self) -> Mapping[LimitName, int]:
        """The tenant's limits that count slots, by name."""
        return self._limits("slots")

    @cached_property
    def token_limits(self) -> Mapping[LimitName, int]:
        """The tenant's limits that count tokens, by name."""
        return self._limits("tokens")

    @cached_property
    def budgets(self) -> Mapping[LimitName, int]:
        """The tenant's token limits for a calendar day or month, by name."""
        return {name: limit for name, limit in self.token_limits.items() if LIMITS[name].budget}

    def _limits(self, *counted: Counted) -> dict[LimitName, int]:
        return {
            name: limit
            for name, kind in LIMITS.items()
            if kind.counts in counted and (limit := getattr(self, name)) is not None
        }

    def may_use(self, name: str, base: str) -> bool:
        """Return True if the tenant may use the model `name`.

        `base` is the name of the base model.
        """
        common = is_common(name, base)
        for pattern in self.models:
            if (common or "/" in pattern) and fnmatchcase(name, pattern):
                return True
        return not common and name.startswith(self.name + "/")


def is_common(name: str, base: str) -> bool:
    """Return True if the model called `name` does not belong to a tenant.

    The names of a tenant's models have the form `TENANT/NAME`. The base model, which is called
    `base`, belongs to no tenant, although its name may have a slash.
    """
    return name == base or "/" not in name


def new_key() -> str:
    """Return a new key with 256 random bits."""
    return KEY_PREFIX + secrets.token_urlsafe(_KEY_BYTES)


def key_hash(key: str) -> str:
    """Return the hash of a key as a `KeyHash`."""
    return "sha256:" + hashlib.sha256(key.encode(errors="surrogateescape")).hexdigest()

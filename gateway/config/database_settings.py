"""Settings of the database."""

from __future__ import annotations

from pydantic import BaseModel, Field, SecretStr, field_validator

from gateway.config.setting_types import Seconds

_SCHEMES = ("postgresql://", "postgres://")


class DatabaseSettings(BaseModel):
    """Database of keys, overrides and the audit log."""

    database_url: SecretStr | None = Field(
        None,
        description="PostgreSQL 13 or newer for keys made over the API, overrides of replicas and "
        "the audit log, the same for all gateways: postgresql://USER:PASSWORD@HOST:PORT/DATABASE, "
        "with libpq's parameters: several hosts with target_session_attrs=read-write, "
        "sslmode=verify-full with sslrootcert=FILE. Without it, this gateway uses a SQLite file in "
        "GATEWAY_STORE_DIR, and several gateways refuse what they would have to share.",
    )
    database_connections: int = Field(
        4,
        ge=1,
        le=100,
        description="Maximum number of each process' connections to PostgreSQL, whose "
        "max_connections must exceed those of all processes of all gateways.",
    )
    database_timeout: Seconds = Field(
        5.0,
        le=600,
        description="Maximum seconds for a statement of PostgreSQL, and for the wait for one of "
        "these connections.",
    )

    @field_validator("database_url")
    @classmethod
    def _check_database_url(cls, url: SecretStr | None) -> SecretStr | None:
        if url is not None and not url.get_secret_value().startswith(_SCHEMES):
            raise ValueError("must begin with postgresql://")
        return url

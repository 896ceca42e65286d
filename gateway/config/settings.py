"""Settings of one gateway process.

The settings are read once at start, from environment variables ``GATEWAY_*`` and secret files.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, Field, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from gateway.config.adapter_settings import AdapterSettings
from gateway.config.database_settings import DatabaseSettings
from gateway.config.request_settings import RequestSettings
from gateway.config.setting_types import AdminKey, Port
from gateway.config.triton_settings import TritonSettings

_SECRETS = Path("/run/secrets")


class ServerSettings(BaseModel):
    """HTTP server and base model."""

    host: str = Field("127.0.0.1", description="Address to listen on.")
    port: Port = Field(9000, description="Port to listen on; 0 selects a free one.")
    workers: int = Field(
        1,
        ge=1,
        le=256,
        description="Processes that serve the port: one for each core that they may use. More "
        "than one need Redis, through which they share adapters, limits and conversations.",
    )
    model_name: str = Field("demo", min_length=1, description="Name of the base model for clients.")
    tokenizer_dir: Path = Field(
        description="Hugging Face folder with tokenizer.json, tokenizer_config.json (chat "
        "template) and generation_config.json.",
    )


class TenantSettings(BaseModel):
    """Tenants, admins and the usage log."""

    config: Path | None = Field(
        None,
        description="YAML file with tenants, their keys and limits; reloaded when it changes and "
        "on SIGHUP.",
    )
    allow_anonymous: bool = Field(
        False,
        description="Whether a gateway without tenants may listen on other addresses than "
        "loopback, where anybody may use it, and answers requests for any host name; "
        "and whether the file of GATEWAY_CONFIG may contain `anonymous: true`. It "
        "never turns keys off.",
    )
    tenants_trust_each_other: bool = Field(
        False,
        description="Whether a tenant may learn that another one has sent the beginning of its "
        "prompt before: `usage` then reports cached tokens, and prompts of all "
        "tenants that begin alike go to one Triton.",
    )
    admin_key: AdminKey | None = Field(
        None,
        description="Key for the endpoints of adapters and keys, of at least 32 characters; "
        "without one, here or in the file of GATEWAY_CONFIG, they answer 403.",
    )
    admin_port: Port | None = Field(
        None,
        description="Second port, for the endpoints of adapters and keys, /metrics and the detail "
        "of /health/ready; the first port then answers 404 for those, and the status "
        "without the detail.",
    )
    usage_log: Path | None = Field(
        None,
        description="File that gets a line of JSON for each admitted request; created again after "
        "it was renamed or deleted, at once on SIGHUP.",
    )
    usage_rows_days: int | None = Field(
        None,
        ge=1,
        le=3660,
        description="Days for which the database stores a row for each admitted request, in the "
        "table `usage_records`; unset stores none. In PostgreSQL, the role must own the tables.",
    )


class ConversationSettings(BaseModel):
    """Responses and conversations."""

    conversations_ttl: int = Field(
        30 * 24 * 3600,
        ge=0,
        le=10 * 365 * 24 * 3600,
        description="Seconds after their last use that responses and conversations are stored, in "
        "Redis and on this gateway's disk; 0 stores nothing, and deletes those on "
        "this disk.",
    )
    conversations_bytes: int = Field(
        256 * 1024 * 1024,
        ge=1024 * 1024,
        description="Bytes of conversations that each tenant may store, in Redis and on each "
        "gateway's disk; above that, the least recently used are deleted.",
    )


class LogSettings(BaseModel):
    """Logs and traces."""

    log_level: str = Field(
        "info", pattern="^(debug|info|warning|error)$", description="Least severe level logged."
    )
    log_format: Literal["text", "json"] = Field(
        "text",
        description="Lines for people, or JSON objects that contain the tenant, model, adapter "
        "version, replica, tokens and times of each request.",
    )
    otlp_endpoint: str | None = Field(
        None,
        pattern=r"^https?://[^/\s]",
        description="Base URL of an OpenTelemetry collector that takes OTLP over HTTP, such as "
        "http://127.0.0.1:4318, for traces. Needs the extra `otel`; headers, sampling and the rest "
        "are in OpenTelemetry's own OTEL_* variables.",
    )


def _make_config() -> SettingsConfigDict:
    return SettingsConfigDict(
        env_prefix="GATEWAY_",
        env_ignore_empty=True,
        frozen=True,
        # Folder in which containers mount secrets. If GATEWAY_FOO is not set, pydantic reads the
        # file gateway_foo in this folder.
        secrets_dir=_SECRETS if _SECRETS.is_dir() else None,
    )


class StorageSettings(DatabaseSettings, AdapterSettings, BaseSettings):
    """The settings of `gateway database`: all of them have defaults."""

    model_config = _make_config() | SettingsConfigDict(extra="ignore")


# The order of the base classes determines the order of the fields. Fields of the last base class
# come first.
class Settings(
    LogSettings,
    ConversationSettings,
    DatabaseSettings,
    AdapterSettings,
    TenantSettings,
    RequestSettings,
    TritonSettings,
    ServerSettings,
    BaseSettings,
):
    """Settings of a process. The field `foo` is read from the variable ``GATEWAY_FOO``."""

    model_config = _make_config()

    @model_validator(mode="after")
    def _check_workers(self) -> Settings:
        if self.workers > 1 and self.redis_url is None:
            raise ValueError("GATEWAY_WORKERS above 1 needs GATEWAY_REDIS_URL")
        return self

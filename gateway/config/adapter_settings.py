"""Settings of LoRA adapters, and of the disk and Redis in which they are stored."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, Field, field_validator

from adapters.base_names import MAX_ALIASES, alias_problem, repeated_alias
from adapters.errors import InvalidSource
from gateway.config.setting_types import Seconds
from gateway.sources.source import parse_prefix
from lora_store import redis_url


class AdapterSettings(BaseModel):
    """Settings of LoRA adapters and their storage."""

    store_dir: Path = Field(
        Path(".state/adapters"),
        description="Folder that durably stores all adapter versions, conversations and, without "
        "GATEWAY_DATABASE_URL, the database.",
    )
    store_ephemeral: bool = Field(
        False,
        description="Whether GATEWAY_STORE_DIR ends with this gateway, as a pod's emptyDir does: "
        "on shutdown it makes sure that Redis has all its conversations, and no other "
        "gateway waits for them.",
    )
    redis_url: str | None = Field(
        None,
        description="Redis that shares adapters, limits and conversations between gateways: "
        "redis://, rediss://, unix://, redis+sentinel://HOST,HOST/SERVICE/DB, "
        "redis+cluster://HOST,HOST (rediss+ for TLS); without it this gateway works "
        "alone with its folder. A private authority is part of the URL: "
        "rediss://HOST:PORT/0?ssl_ca_certs=FILE, as are ssl_certfile and ssl_keyfile "
        "if Redis requires them.",
    )
    redis_timeout: float = Field(
        default=0.25,
        gt=0,
        description="Seconds that Redis may take to count a request for its tenant's limits. A "
        "request waits at most twice as long; its limits are then counted as "
        "when_redis_is_away specifies.",
    )
    redis_ttl: int | None = Field(
        None,
        gt=0,
        description="Seconds after its last use that an adapter version remains in Redis; unset "
        "leaves it to Redis' memory policy.",
    )
    memory_bytes: int = Field(
        256 * 1024 * 1024, ge=0, description="Adapter versions cached in this process, in bytes."
    )
    cold_send_bytes: int = Field(
        512 * 1024 * 1024,
        gt=0,
        description="Adapter versions that are read for Triton or uploaded to it at once, in "
        "bytes, whether cached or not. A tenant may use half, and its further ones "
        "wait; a version that is larger is sent alone.",
    )
    adapters: dict[str, Path] = Field(
        default_factory=dict,
        description='Adapters to register at start, a JSON object: {"NAME": "FOLDER"}.',
    )
    adapter_root: Path | None = Field(
        None,
        description="Folder that /v1/load_lora_adapter may read from; unset refuses that call.",
    )
    adapter_sources: list[str] = Field(
        default_factory=list,
        description="Sources that an admin may fetch adapters from, a JSON list of prefixes: "
        '["https://models.example.com/lora", "s3://bucket/lora", "hf://", '
        '"/srv/adapters"]. Each stands for everything below it, and redirects must '
        "lead to one of them. If empty, admins can only upload, and name folders "
        "below GATEWAY_ADAPTER_ROOT.",
    )
    adapter_source_timeout: Seconds = Field(
        600.0, description="Seconds in which an adapter must be fetched from its source."
    )
    base_model_aliases: list[str] = Field(
        default_factory=list,
        description="Other names of the base model, NAME or OWNER/NAME, that adapters may have in "
        "`base_model_name_or_path`, a JSON list: "
        '["unsloth/Meta-Llama-3.1-8B-Instruct"]. Those of `base_model_aliases` in the '
        "configuration file are added. Do not list other models: their adapters would "
        "be served and give wrong answers.",
    )
    trust_adapter_templates: bool = Field(
        False,
        description="Whether adapters that admins upload or load may have a chat template of "
        "their own. It runs in this process, sandboxed but without a limit of time or "
        "memory. Those of GATEWAY_ADAPTERS always may.",
    )
    peft_dir: Path | None = Field(
        None,
        description="Path at which Tritons that read adapters from disk (llmapi) mount the folder "
        "`peft` of this gateway's store, GATEWAY_STORE_DIR/MODEL/peft, on a volume "
        "that they share with it. If unset, agents copy adapters to their disks "
        "(docs/lora-on-disk.md).",
    )
    adapter_wait: Seconds = Field(
        20.0,
        description="Seconds that a request waits for a Triton to get its adapter on its disk; it "
        "then gets 503 `adapter_not_ready`.",
    )
    max_adapter_bytes: int = Field(
        1024**3, gt=0, description="Largest adapter weights file, in bytes."
    )

    @field_validator("adapter_sources")
    @classmethod
    def _check_sources(cls, sources: list[str]) -> list[str]:
        for number, text in enumerate(sources):
            try:
                source = parse_prefix(text)
            except InvalidSource as error:
                raise ValueError(f"[{number}]: found {error.found}; {error.allowed}") from None
            if source.revision or source.user or source.query:
                raise ValueError(f"[{number}]: must be without revision, user and query")
        return sources

    @field_validator("base_model_aliases")
    @classmethod
    def _check_aliases(cls, aliases: list[str]) -> list[str]:
        if len(aliases) > MAX_ALIASES:
            raise ValueError(f"has {len(aliases)} names; at most {MAX_ALIASES} are allowed")
        for number, alias in enumerate(aliases):
            if problem := alias_problem(alias):
                raise ValueError(f"[{number}]: found {alias[:80]!r}; {problem}")
        if (again := repeated_alias(aliases)) is not None:
            raise ValueError(f"[{again}]: found {aliases[again]!r}; it is there already")
        return aliases

    @field_validator("redis_url")
    @classmethod
    def _check_redis_url(cls, url: str | None) -> str | None:
        # Check the URL here, not in redis-py: if the password is not %-encoded, redis-py's error
        # message quotes part of the password as the port.
        if url is not None:
            redis_url.parse(url)
        return url

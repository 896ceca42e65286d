"""Settings of one gateway process, read once at the entry from ``GATEWAY_*`` variables."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field, SecretStr
from pydantic_settings import BaseSettings, SettingsConfigDict

from gateway.tools.forms import Form

AdminKey = Annotated[SecretStr, Field(min_length=8)]
Seconds = Annotated[float, Field(gt=0)]


class Settings(BaseSettings):
    """Field `foo` is read from the variable ``GATEWAY_FOO``; tests construct it directly."""

    model_config = SettingsConfigDict(env_prefix="GATEWAY_", env_ignore_empty=True, frozen=True)

    host: str = Field("127.0.0.1", description="Address to listen on.")
    port: int = Field(9000, ge=0, le=65535, description="Port to listen on; 0 takes a free one.")
    model_name: str = Field("demo", min_length=1, description="Name of the base model for clients.")
    tokenizer_dir: Path = Field(
        description="Hugging Face folder with tokenizer.json, tokenizer_config.json (chat "
        "template) and generation_config.json.",
    )
    triton_grpc: str = Field("127.0.0.1:8001", description="Triton's gRPC endpoint, host:port.")
    triton_model: str = Field("tensorrt_llm", description="Name of the core model in Triton.")
    max_seq_len: int | None = Field(
        None,
        gt=0,
        description="Prompt plus output limit in tokens; needed only when the engine's "
        "config.json cannot be read from here.",
    )
    request_timeout: Seconds = Field(
        600.0, description="Seconds after which a request is stopped and answered with 504."
    )
    keep_alive: Seconds = Field(
        10.0,
        description="Seconds without a first token after which a stream sends its headers and "
        "then, as often, a comment, so that proxies keep the line.",
    )
    cors_origins: list[str] = Field(
        default_factory=list,
        description='Origins that browsers may call from, a JSON list; ["*"] for any.',
    )
    shutdown_grace: Seconds = Field(
        30.0, description="Seconds that running requests get to finish after SIGTERM."
    )
    max_body_bytes: int = Field(
        8 * 1024 * 1024, gt=0, description="Largest request body, in bytes; larger ones get 413."
    )
    tool_form: Form | None = Field(
        None,
        description="How the model writes tool calls: hermes, llama3_json, mistral or pythonic; "
        "guessed from the chat template.",
    )
    admin_key: AdminKey | None = Field(
        None, description="Key for the adapter endpoints; without one they answer 403."
    )
    store_dir: Path = Field(
        Path(".state/adapters"), description="Folder that keeps all adapter versions durably."
    )
    redis_url: str | None = Field(
        None,
        description="Redis that shares adapters between gateways (redis://, rediss://, unix://); "
        "without it this gateway is alone with its folder.",
    )
    redis_ttl: int | None = Field(
        None,
        gt=0,
        description="Seconds after its last use that an adapter version stays in Redis; unset "
        "leaves it to Redis' memory policy.",
    )
    memory_bytes: int = Field(
        256 * 1024 * 1024, ge=0, description="Adapter versions kept in this process, in bytes."
    )
    adapters: dict[str, Path] = Field(
        default_factory=dict,
        description='Adapters to register at start, a JSON object: {"NAME": "FOLDER"}.',
    )
    adapter_root: Path | None = Field(
        None,
        description="Folder that /v1/load_lora_adapter may read from; unset refuses that call.",
    )
    max_adapter_bytes: int = Field(
        1024**3, gt=0, description="Largest adapter weights file, in bytes."
    )
    log_level: str = Field(
        "info", pattern="^(debug|info|warning|error)$", description="Least severe level logged."
    )

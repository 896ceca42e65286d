"""Settings of the connection to Triton, and of the concurrent requests (slots) of its engines."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, Field, SecretStr, field_validator

from gateway.config.setting_types import Seconds
from gateway.scheduling.discovery import check_endpoint


class TritonSettings(BaseModel):
    """Connection to Triton, and the slots (concurrent requests) of its engines."""

    triton_grpc: str = Field(
        "127.0.0.1:8001",
        description="Triton's gRPC endpoint, host:port, or several, separated by commas; "
        "grpcs://host:port for TLS. dns:///host:port (grpcs+dns:///host:port) stands "
        "for all addresses of a name. `replicas` in the configuration file overrides "
        "this.",
    )
    replica_in_flight: int | None = Field(
        None,
        gt=0,
        description="Concurrent requests on each Triton. Unset: 5/4 of the engine's "
        "max_batch_size if its config.json can be read; 64 with the llmapi "
        "repository, which does not report it (the log warns); otherwise no limit.",
    )
    max_in_flight: int = Field(
        4096, gt=0, description="Concurrent requests of this process, on all Tritons."
    )
    queue_size: int = Field(
        1024, ge=0, description="Requests that may wait in the queue; more are refused with 503."
    )
    queue_timeout: Seconds = Field(
        30.0,
        description="Seconds that a request may wait in the queue; it then gets 503. Together "
        "with GATEWAY_KEEP_ALIVE, keep it below the time that proxies wait for a "
        "first byte.",
    )
    max_expected_wait: Seconds = Field(
        10.0,
        description="Maximum expected wait of a queued request in seconds, at most "
        "GATEWAY_QUEUE_TIMEOUT. A request whose wait is expected to be longer gets 503 at once. "
        "A queued request whose wait turns out longer may wait until GATEWAY_QUEUE_TIMEOUT. "
        "Tenants with `first_token_within` have that limit instead, and background responses "
        "GATEWAY_QUEUE_TIMEOUT.",
    )
    refuse_early: bool = Field(
        True,
        description="Whether a queued request gets 503 as soon as its first token is not expected "
        "in time: before its deadline, within GATEWAY_MAX_EXPECTED_WAIT, and within "
        "`first_token_within` of its tenant. If off, it waits until GATEWAY_QUEUE_TIMEOUT.",
    )
    tenant_share: float = Field(
        0.75,
        gt=0,
        le=1,
        description="Fraction of all slots that one tenant may use at once, so that the next "
        "tenant finds a free one; only with tenants.",
    )
    triton_transport: Literal["http2", "grpcio"] = Field(
        "http2",
        description="Transport of the calls to Triton: http2, the gateway's own, or grpcio, the "
        "slower reference.",
    )
    triton_tls_ca: Path | None = Field(
        None,
        description="PEM file of the authorities that a grpcs:// endpoint is verified against; "
        "unset uses the system's.",
    )
    triton_tls_cert: Path | None = Field(
        None, description="PEM file of the client certificate that the gateway presents to Triton."
    )
    triton_tls_key: Path | None = Field(None, description="PEM file of that certificate's key.")
    triton_metadata: dict[str, SecretStr] = Field(
        default_factory=dict,
        description="gRPC metadata of every call, a JSON object, such as the key of a restricted "
        'protocol: {"triton-grpc-protocol-KEY": "VALUE"}.',
    )
    triton_model: str = Field("tensorrt_llm", description="Name of the core model in Triton.")
    triton_mode: Literal["auto", "token", "text", "llmapi"] = Field(
        "auto",
        description="Token ids to the core model (token), text to a model above it (text), or "
        "text to the one model of the llmapi repository (llmapi). auto selects the "
        "core model, of either repository, if possible.",
    )
    triton_text_model: str | None = Field(
        None,
        description="Name of the model that takes text; unset selects ensemble, else "
        "tensorrt_llm_bls.",
    )
    tokenizer_check: Literal["refuse", "warn"] = Field(
        "refuse",
        description="Handling of a Triton whose tokenizer is not that of GATEWAY_TOKENIZER_DIR: "
        "refuse excludes it, warn serves it and reports it in the log and in "
        "/health/ready.",
    )
    max_seq_len: int | None = Field(
        None,
        gt=0,
        description="Limit of prompt plus output in tokens. Needed if the engine's config.json "
        "cannot be read from here, and with the llmapi repository, which has no such "
        "file.",
    )
    tokens_per_block: int = Field(
        32,
        gt=0,
        description="Tokens in a block of the KV cache, for cached tokens through the llmapi "
        "repository, which counts blocks: tokens_per_block of kv_cache_config in its model.yaml.",
    )

    @property
    def triton_endpoints(self) -> list[str]:
        return [endpoint.strip() for endpoint in self.triton_grpc.split(",")]

    @property
    def wait_warning(self) -> str:
        """Warning text if GATEWAY_MAX_EXPECTED_WAIT is set but has no effect, else ""."""
        # Do not warn about the default, even if it exceeds a short GATEWAY_QUEUE_TIMEOUT.
        is_set = "max_expected_wait" in self.model_fields_set
        if not is_set or self.max_expected_wait <= self.queue_timeout:
            return ""
        return (
            f"GATEWAY_MAX_EXPECTED_WAIT, {self.max_expected_wait:g} s, has no effect above "
            f"GATEWAY_QUEUE_TIMEOUT, {self.queue_timeout:g} s; lower the former, or raise the "
            "latter"
        )

    @field_validator("triton_grpc")
    @classmethod
    def _check_endpoints(cls, endpoints: str) -> str:
        for endpoint in endpoints.split(","):
            try:
                check_endpoint(endpoint.strip())
            except ValueError as error:
                raise ValueError(f"{endpoint.strip()!r} {error}") from None
        return endpoints

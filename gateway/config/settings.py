"""Settings of one gateway process, read once at start: ``GATEWAY_*`` variables, and files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    SecretStr,
    field_validator,
    model_validator,
)
from pydantic_settings import BaseSettings, SettingsConfigDict

from adapters.base_names import MAX_ALIASES, alias_problem, repeated_alias
from adapters.errors import InvalidSource
from gateway.parsers.reasoning import ReasoningParser
from gateway.parsers.tools.forms import Form
from gateway.scheduling.discovery import check_endpoint
from gateway.sources.source import parse_prefix
from lora_store import redis_url

MIN_ADMIN_KEY_CHARS = 32
"""Minimum length; `gateway key new --admin` makes 46 characters of 256 random bits."""


def _check_admin_key(key: SecretStr) -> SecretStr:
    if len(key.get_secret_value()) < MIN_ADMIN_KEY_CHARS:
        raise ValueError(
            f"has {len(key.get_secret_value())} characters; it must have at least "
            f"{MIN_ADMIN_KEY_CHARS}, as those that `gateway key new --admin` prints"
        )
    return key


def is_service_link(value: str) -> bool:
    """Return True if Kubernetes writes such a value into the variable NAME_PORT for a Service
    `name`.
    """
    return value.startswith(("tcp://", "udp://", "sctp://"))


def _refuse_service_link(value: Any) -> Any:
    if isinstance(value, str) and is_service_link(value):
        raise ValueError(
            f"{value} is what Kubernetes puts there for a Service of that name (a service link); "
            "set enableServiceLinks: false in the pod's spec, or this variable to a number"
        )
    return value


AdminKey = Annotated[SecretStr, AfterValidator(_check_admin_key)]
Port = Annotated[int, BeforeValidator(_refuse_service_link), Field(ge=0, le=65535)]
Seconds = Annotated[float, Field(gt=0)]
_SECRETS = Path("/run/secrets")


class Settings(BaseSettings):
    """Settings of a process. Field `foo` is read from ``GATEWAY_FOO``; tests set it directly."""

    model_config = SettingsConfigDict(
        env_prefix="GATEWAY_",
        env_ignore_empty=True,
        frozen=True,
        # Containers mount secrets here: the file gateway_foo is read if the variable is not set.
        secrets_dir=_SECRETS if _SECRETS.is_dir() else None,
    )

    host: str = Field("127.0.0.1", description="Address to listen on.")
    port: Port = Field(9000, description="Port to listen on; 0 selects a free one.")
    workers: int = Field(
        1,
        ge=1,
        le=256,
        description="Processes that serve the port: one for each core that they may use. More "
        "than one need Redis, through which they share adapters, limits and keys.",
    )
    model_name: str = Field("demo", min_length=1, description="Name of the base model for clients.")
    tokenizer_dir: Path = Field(
        description="Hugging Face folder with tokenizer.json, tokenizer_config.json (chat "
        "template) and generation_config.json.",
    )
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
        description="Maximum expected wait of a queued request in seconds. A request whose wait "
        "is expected to be longer gets 503 at once. A queued request whose wait turns "
        "out longer may wait until GATEWAY_QUEUE_TIMEOUT. Tenants with "
        "`first_token_within` have that limit instead, and background responses "
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
    request_timeout: Seconds = Field(
        600.0, description="Seconds after which a request is cancelled and answered with 504."
    )
    first_response_timeout: Seconds = Field(
        120.0,
        description="Seconds in which an engine of the llmapi repository must begin to stream an "
        "answer. After that another replica is asked, or the answer is 503. Some "
        "releases of that repository never answer after an error. Set it longer than "
        "the engine queues requests under load.",
    )
    continuations: int = Field(
        2,
        ge=0,
        description="Number of replica failures that an answer, streamed or not, survives after "
        "its first token: another replica resumes it. 0 turns this off, and answers "
        "then finish on a replica that is drained.",
    )
    replica_drain_grace: Seconds = Field(
        10.0,
        description="Seconds that answers may take to finish on a replica that is drained, or "
        "that was removed from the configuration or DNS, before another replica "
        "resumes them.",
    )
    keep_alive: Seconds = Field(
        10.0,
        description="Seconds without a first token after which a stream that has a slot sends its "
        "headers and then, at this interval, a comment, so that proxies do not close "
        "the connection.",
    )
    keep_alive_in_queue: bool = Field(
        False,
        description="Whether a queued stream does the same. A refusal by the queue is then an "
        "error after a 200, which clients do not retry.",
    )
    cors_origins: list[str] = Field(
        default_factory=list,
        description='Origins that browsers may call from, a JSON list; ["*"] for any.',
    )
    console: bool = Field(
        True,
        description="Whether browsers find the console at `/`: pages that need no key and show "
        "what the API answers to the key of their user.",
    )
    header_timeout: Seconds = Field(
        10.0,
        description="Seconds from connecting, or from a request's first byte, to the end of its "
        "headers; then 408.",
    )
    body_timeout: Seconds = Field(
        60.0,
        description="Seconds in which a request's body must end, or 64 KiB of it arrive; then 408.",
    )
    write_timeout: Seconds = Field(
        60.0,
        description="Seconds after which a client that reads nothing of its answer is "
        "disconnected, and the engine stops.",
    )
    max_connections: int = Field(
        4096,
        gt=0,
        description="Connections with a running request that each process accepts; further "
        "requests get 503, except for health, metrics and the admin port. 64 more "
        "connections may be idle; above that, the longest idle ones are closed. Set "
        "it well below the limit of open files.",
    )
    max_connections_per_address: int = Field(
        0,
        ge=0,
        description="Connections of one IP address (of IPv6, one /64) that each process accepts; "
        "further requests get 503. 0 sets no limit: behind a balancer or a proxy all "
        "clients have its address. If clients connect directly, use 256, for example.",
    )
    tls_cert: Path | None = Field(
        None,
        description="PEM file of this server's certificate, and those between it and the root: "
        "both ports then accept HTTPS only. It is reloaded when it changes, and on "
        "SIGHUP, as are the other certificate files (docs/operations.md).",
    )
    tls_key: Path | None = Field(None, description="PEM file of that certificate's key.")
    tls_client_ca: Path | None = Field(
        None,
        description="PEM file of the authorities that every client's certificate must be verified "
        "against; unset requires no client certificate.",
    )
    shutdown_grace: Seconds = Field(
        30.0, description="Seconds that running requests get to finish after SIGTERM."
    )
    drain_seconds: float = Field(
        0.0,
        ge=0,
        description="Seconds after SIGTERM in which requests are still accepted although "
        "readiness is off. Behind a balancer, use a little more than it takes to "
        "notice: 5, for example.",
    )
    max_body_bytes: int = Field(
        8 * 1024 * 1024, gt=0, description="Largest request body, in bytes; larger ones get 413."
    )
    strict_parameters: bool = Field(
        False,
        description="Whether parameters that have no effect here (Ollama's `num_ctx`, for "
        "example) get 400; otherwise the answer names them in `x-ignored-parameters`.",
    )
    xgrammar_release: str = Field(
        "",
        pattern=r"^(\d+\.\d+\.\d+)?$",
        description="The release of xgrammar in the engines, such as 0.1.25. Schemas and grammars "
        "that the release compiles too slowly get 400. Empty: any from 0.1.25 to 0.1.33 "
        "(docs/structured-output.md).",
    )
    unknown_parameters: Literal["tell", "refuse"] = Field(
        "tell",
        description="Handling of parameters whose name is unknown: tell names them in "
        "`x-ignored-parameters` and counts them by name, refuse answers 400. "
        "GATEWAY_STRICT_PARAMETERS refuses such names, too.",
    )
    max_prompt_logits_bytes: int = Field(
        2**30,
        gt=0,
        lt=2**31,
        description="Largest logits of a prompt whose log probabilities are requested, in bytes: "
        "tokens times vocabulary times 4 (2 if the model declares halves); larger "
        "ones get 400. Triton has all of them in memory, the gateway a part at a "
        "time.",
    )
    tool_form: Form | None = Field(
        None,
        description=f"How the model writes tool calls, by the name of vLLM's parser: "
        f"{', '.join(get_args(Form))}; guessed from the chat template.",
    )
    reasoning_parser: ReasoningParser | None = Field(
        None,
        description="How the model marks its reasoning, by the names of vLLM's parsers: "
        "deepseek_r1, glm45, kimi_k2, minimax_m2, nemotron_v3 or qwen3 (<think>), granite, kimi "
        "(◁think▷), mistral ([THINK]) or seed_oss; guessed from the chat template.",
    )
    control_tokens_in_messages: bool = Field(
        False,
        description="Whether control tokens in messages and tools, such as <|im_end|>, are parsed "
        "as such tokens, so that the author of a message can end its turn and begin "
        "another; otherwise they are text. Prompts of /v1/completions may always "
        "contain them.",
    )
    exclude_tools_when_tool_choice_none: bool = Field(
        False,
        description="Whether `tool_choice: none` removes the tools from the prompt. If off, the "
        "prompt is that of `auto`, whose cached prefix can be reused, and an answer "
        "is text.",
    )
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
    store_dir: Path = Field(
        Path(".state/adapters"),
        description="Folder that durably stores all adapter versions, keys made over the API, and "
        "conversations.",
    )
    store_ephemeral: bool = Field(
        False,
        description="Whether GATEWAY_STORE_DIR ends with this gateway, as a pod's emptyDir does: "
        "on shutdown it makes sure that Redis has all its conversations, and no other "
        "gateway waits for them.",
    )
    redis_url: str | None = Field(
        None,
        description="Redis that shares adapters, limits and keys between gateways: redis://, "
        "rediss://, unix://, redis+sentinel://HOST,HOST/SERVICE/DB, "
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

    @property
    def refuse_unknown(self) -> bool:
        """True if a parameter with an unknown name gets 400."""
        return self.strict_parameters or self.unknown_parameters == "refuse"

    @property
    def triton_endpoints(self) -> list[str]:
        return [endpoint.strip() for endpoint in self.triton_grpc.split(",")]

    @field_validator("triton_grpc")
    @classmethod
    def _check_endpoints(cls, endpoints: str) -> str:
        for endpoint in endpoints.split(","):
            try:
                check_endpoint(endpoint.strip())
            except ValueError as error:
                raise ValueError(f"{endpoint.strip()!r} {error}") from None
        return endpoints

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
        # redis-py's own error would quote part of the password, which it takes for the port.
        if url is not None:
            redis_url.parse(url)
        return url

    @model_validator(mode="after")
    def _check_tls(self) -> Settings:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("GATEWAY_TLS_CERT and GATEWAY_TLS_KEY need each other")
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise ValueError("GATEWAY_TLS_CLIENT_CA needs GATEWAY_TLS_CERT")
        return self

    @model_validator(mode="after")
    def _check_workers(self) -> Settings:
        if self.workers > 1 and self.redis_url is None:
            raise ValueError("GATEWAY_WORKERS above 1 needs GATEWAY_REDIS_URL")
        return self

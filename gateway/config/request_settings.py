"""Settings of requests and connections: deadlines, limits, and the handling of parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, get_args

from pydantic import BaseModel, Field, model_validator

from gateway.config.setting_types import Seconds, XgrammarRelease
from gateway.parsers.reasoning import ReasoningParser
from gateway.parsers.tools.forms import Form


class RequestSettings(BaseModel):
    """Handling of requests and connections."""

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
        "SIGHUP, as are the other certificate files (docs/certificates.md).",
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
    xgrammar_release: XgrammarRelease = Field(
        "",
        description="The release of xgrammar in the engines, X.Y.Z, such as 0.1.32. Schemas and "
        "grammars that the release compiles too slowly get 400. Empty: any from 0.1.25 to 0.1.33 "
        '(docs/structured-output.md). To see the release, run `python3 -c "from '
        "importlib.metadata import version; print(version('xgrammar'))\"` in Triton's container.",
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

    @property
    def refuse_unknown(self) -> bool:
        """True if a request with an unknown parameter gets 400."""
        return self.strict_parameters or self.unknown_parameters == "refuse"

    @model_validator(mode="after")
    def _check_tls(self) -> RequestSettings:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("GATEWAY_TLS_CERT and GATEWAY_TLS_KEY need each other")
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise ValueError("GATEWAY_TLS_CLIENT_CA needs GATEWAY_TLS_CERT")
        return self

"""pydantic models that describe the response of /v1/admin/state in the OpenAPI document.

The response is not built from these models. Members whose value is not known are missing from the
response. docs/console-api.md explains the members.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from gateway.api.answer_schemas import Count, Described, TroubleState


class _Facts(Described):
    model_config = ConfigDict(extra="forbid")


class Gateway(_Facts):
    version: str
    model: str
    started: float
    workers: Count
    answering: Annotated[int, Field(description="Workers that this state includes.")]
    ready: bool
    redis: Literal["up", "down"] = "up"


class Failure(_Facts):
    time: float
    message: str


class Override(_Facts):
    weight: Annotated[float, Field(ge=0)] = 0.0
    drain: bool = False


class ReplicaState(_Facts):
    state: Literal["ready", "draining", "failing", "leaving", "away"]
    weight: float
    drain: bool
    in_flight: Count
    requests: Count
    places: Count = 0
    mode: str = ""
    model: str = ""
    why: Annotated[str, Field(description="Why it is unavailable.")] = ""
    last_failure: Failure = Field(default=None)  # type: ignore[assignment]
    override: Annotated[
        Override, Field(description="The admins' override of the configuration.")
    ] = Field(default=None)  # type: ignore[assignment]


class VersionState(_Facts):
    bytes: Count
    created: float
    source: str
    rank: Count = 0
    added_by: str = ""


class Cell(_Facts):
    state: Literal["held", "loading", "lacking", "cold"]
    evicted: Count = 0
    why: Annotated[str, Field(description="Why the state is `lacking`.")] = ""


class AdapterState(_Facts):
    served: str
    versions: dict[str, VersionState]
    requests_per_minute: float = 0.0
    replicas: Annotated[
        dict[str, Cell], Field(description="Replicas that are left out are `cold`.")
    ]


class LimitState(_Facts):
    limit: Count
    used: Count


class Refusal(_Facts):
    time: float
    why: str
    mistake: Annotated[bool, Field(description="The request itself was at fault.")] = False


class KeyState(_Facts):
    from_: Annotated[Literal["file", "api"], Field(alias="from")]
    created: float = 0.0
    note: str = ""
    expires: float = 0.0
    last_used: float = 0.0


class TenantState(_Facts):
    running: Count
    waiting: Count
    requests_per_minute: float
    tokens_per_minute: float
    limits: dict[str, LimitState]
    refused: dict[str, Count] = Field(default_factory=dict)
    last_refusal: Refusal = Field(default=None)  # type: ignore[assignment]
    keys: dict[str, KeyState]


class _RequestFacts(_Facts):
    request_id: str
    tenant: str
    model: str
    path: str
    started: float
    prompt_tokens: Count
    completion_tokens: Count
    replica: str = ""
    worker: Count


class RunningRequest(_RequestFacts):
    state: Literal["queued", "running", "stopping"]


class EndedRequest(_RequestFacts):
    ended: float
    status: int
    finish: list[str] = Field(default_factory=list)
    error: str = ""
    ttft_ms: float = 0.0
    stop: str = ""
    stop_ms: float = 0.0


class Point(_Facts):
    tokens: Count
    requests: Count
    errors: Count
    cold_sends: Count
    queue: Count
    ttft_p50_ms: float = 0.0
    ttft_p99_ms: float = 0.0


class History(_Facts):
    step: Count
    points: dict[str, Point]


class State(_Facts):
    time: float
    gateway: Gateway
    troubles: Annotated[dict[str, TroubleState], Field(description="Current problems.")]
    replicas: dict[str, ReplicaState]
    waiting: Annotated[Count, Field(description="Requests that wait for a slot of an engine.")]
    waiting_to_begin: Annotated[
        Count, Field(description="Requests that wait because the gateway's own core is busy.")
    ]
    in_flight: Count
    places: Count
    adapters: dict[str, AdapterState]
    tenants: dict[str, TenantState]
    requests: dict[str, RunningRequest]
    ended: dict[str, EndedRequest]
    history: History
    left_out: Annotated[
        dict[str, Count], Field(description="Number of objects that are not shown, by kind.")
    ] = Field(default_factory=dict)

"""What crosses the rooms: a validated request on its way in, deltas on their way out.

Nothing here knows HTTP, gRPC or a tokenizer.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Literal

from adapters.adapter import Converted

FinishReason = Literal["stop", "length"]
ColdCause = Literal["first_use", "evicted", "restarted", "refused"]
StopReason = Literal["disconnect", "stop_string", "timeout", "shutdown"]


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters with OpenAI's meaning; `temperature` 0 is greedy.

    `top_k` 0 means no limit. `seed` is always set, so that the engine never falls back to its
    own constant one.
    """

    seed: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0 or self.top_p == 0.0 or self.top_k == 1


@dataclass(frozen=True, slots=True)
class Lora:
    """The adapter version of a request. `weights` reads its tensors, which only a cold one needs.

    `name` labels metrics; `task_id` is what the engine knows the version by.
    """

    name: str
    task_id: int
    weights: Callable[[], Awaitable[Converted]]


@dataclass(frozen=True, slots=True)
class Generation:
    """A request that may run: tokenized, within the engine's limits, with a unique id.

    `stop` holds the stop strings; `stop_ids` the same as token ids plus further end-of-sequence
    ids, as a help to the engine only: the text decides.
    """

    request_id: str
    prompt_ids: list[int]
    max_tokens: int
    sampling: Sampling
    stop: tuple[str, ...] = ()
    stop_ids: tuple[tuple[int, ...], ...] = ()
    lora: Lora | None = None


@dataclass(frozen=True, slots=True)
class Options:
    """What a request asks for, the same for all its prompts; `max_tokens` None is no limit."""

    sampling: Sampling
    stop: tuple[str, ...] = ()
    max_tokens: int | None = None
    n: int = 1
    lora: Lora | None = None


@dataclass(frozen=True, slots=True)
class Batch:
    """The generations of one request, one per choice: all of the first prompt, then the next.

    `prompt_tokens` counts each prompt once. Each choice is an engine request of its own, so that
    a stop string ends one choice alone (`num_return_sequences` shares one id and one stop).
    """

    request_id: str
    generations: list[Generation]
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class TokenDelta:
    """New token ids from the engine; `final` marks the last delta of the request."""

    ids: list[int]
    final: bool


@dataclass(frozen=True, slots=True)
class TextDelta:
    """New text, valid Unicode, possibly empty; `tokens` is the running count of generated ids.

    `finish` is set on the last delta and only there.
    """

    text: str
    tokens: int
    finish: FinishReason | None = None


ChoiceDelta = tuple[int, TextDelta]
"""The index of a choice and what is new in it."""


@dataclass(frozen=True, slots=True)
class ColdSend:
    """Weights that went to the engine: `seconds` from reading them to its first response.

    The cause `refused` means in vain: the engine's cache was full of adapters in use.
    """

    adapter: str
    cause: ColdCause
    nbytes: int
    seconds: float

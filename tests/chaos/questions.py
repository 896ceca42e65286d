"""Questions to the models, and the correct answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tests.support.generated_adapters import PROMPT, TOKENS

_CAPITAL = "美国的首都在哪里? \n答案:"
_LONG_ANSWER = "Count from 1 to 60"
# Longer than texts tokenized on the event loop, with some 1,300 of the model's 2,048 tokens.
_LONG_PROMPT = "The capital of France is Paris. " * 150 + _CAPITAL


@dataclass(frozen=True, eq=False)
class Question:
    """A request: `fields` of the body without the model. `weight` is its relative frequency."""

    name: str
    path: str
    fields: Mapping[str, Any]
    weight: float

    def body(self, model: str, *, stream: bool) -> dict[str, Any]:
        body = {"model": model, "temperature": 0, **self.fields}
        if stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        return body


_COMPLETIONS, _CHAT = "/v1/completions", "/v1/chat/completions"
SHORT = Question("short", _COMPLETIONS, {"prompt": _CAPITAL, "max_tokens": 10}, 0.6)
LONG = Question(
    "long answer",
    _CHAT,
    {"messages": [{"role": "user", "content": _LONG_ANSWER}], "max_tokens": 230},
    0.12,
)
QUESTIONS = (
    SHORT,
    Question("two choices", _COMPLETIONS, {**SHORT.fields, "n": 2}, 0.15),
    Question("log probabilities", _COMPLETIONS, {**SHORT.fields, "logprobs": 2}, 0.1),
    Question("long prompt", _COMPLETIONS, {**SHORT.fields, "prompt": _LONG_PROMPT}, 0.03),
    LONG,
    Question("guided", _CHAT, {**LONG.fields, "guided_regex": "[^#]*"}, 0.08),
)
GENERATED = Question("generated", _COMPLETIONS, {"prompt": PROMPT, "max_tokens": TOKENS}, 0)
"""A question whose answer identifies an adapter's content (`tests.support.generated_adapters`)."""

# Known answers by content.
CAPITALS = {"demo": "Washington, D.C.", "zh": "华盛顿", "ja": "ワシントン"}


class Wrong(Exception):
    """Error for an answer that no client should ever see."""


def text_of(frames: list[dict[str, Any]]) -> str:
    """Return the text of a complete body or of a stream's chunks.

    Raises Wrong if choices or their fields contradict each other.
    """
    texts: dict[int, str] = {}
    logprobs: list[float] = []
    for choice in (choice for frame in frames for choice in frame["choices"]):
        part = choice.get("message") or choice.get("delta") or choice
        text = part.get("content") or part.get("text") or ""
        texts[choice["index"]] = texts.get(choice["index"], "") + text
        if choice.get("logprobs"):
            logprobs += choice["logprobs"]["token_logprobs"]
    if len(set(texts.values())) != 1:
        raise Wrong(f"choices of one greedy question differ: {texts}")
    tokens = frames[-1]["usage"]["completion_tokens"]
    if logprobs and (len(logprobs) != tokens or max(logprobs) > 0):
        raise Wrong(f"log probabilities of {tokens} tokens: {logprobs}")
    return texts[0].strip()

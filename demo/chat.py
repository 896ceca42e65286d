"""Training examples of the demo model, and their conversion to text and token ids.

An example is a chat or a raw completion. Each token gets a flag, which is True if the token belongs
to an answer, because only answers contribute to the training loss.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

TEMPLATE = Path(__file__).with_name("chat_template.jinja")
Message = dict[str, Any]
Tool = dict[str, Any]


@dataclass(frozen=True)
class ChatExample:
    """A chat in OpenAI's format. The model is trained to generate every assistant message."""

    messages: list[Message]
    tools: list[Tool] = field(default_factory=list)


@dataclass(frozen=True)
class Raw:
    """A prompt and its completion, without the chat template."""

    prompt: str
    completion: str


Example = ChatExample | Raw


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}


@cache
def _template() -> Callable[..., str]:
    # Create the same environment that transformers uses to render chat templates.
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)

    def raise_exception(message: str) -> None:
        raise ValueError(message)

    environment.globals["raise_exception"] = raise_exception
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render


def render(messages: list[Message], tools: list[Tool], *, generate: bool) -> str:
    """Apply the chat template, and return the chat as text.

    If ``generate`` is True, the text ends with the header of a new assistant message.
    """
    return _template()(messages=messages, tools=tools, add_generation_prompt=generate)


def segments(example: Example) -> list[tuple[str, bool]]:
    """Return the example's text as consecutive parts, each with a flag.

    The flag is True if the part is an answer, which the model is trained to generate.
    """
    if isinstance(example, Raw):
        return [(example.prompt, False), (example.completion + "<|endoftext|>", True)]
    pieces: list[tuple[str, bool]] = []
    done = 0
    for index, message in enumerate(example.messages):
        if message["role"] != "assistant":
            continue
        prompt = render(example.messages[:index], example.tools, generate=True)
        text = render(example.messages[: index + 1], example.tools, generate=False)
        if not text.startswith(prompt):
            raise ValueError("the chat template must only ever append")
        pieces += [(prompt[done:], False), (text[len(prompt) :].removesuffix("\n"), True)]
        done = len(text) - 1
    return pieces


def encode(example: Example, tokenizer: Tokenizer) -> tuple[list[int], list[bool]]:
    """Return the token ids and, for each id, True if it belongs to an answer."""
    pieces = segments(example)
    encoded = tokenizer.encode_batch([text for text, _ in pieces], add_special_tokens=False)
    ids = [token for piece in encoded for token in piece.ids]
    learn = [flag for piece, (_, flag) in zip(encoded, pieces, strict=True) for _ in piece.ids]
    return ids, learn

"""Streaming separation of reasoning (`<think>...</think>`) from content.

Only text at the beginning of the output can be reasoning. Whitespace before the opening tag is
dropped. Whitespace before and after the closing tag is unchanged, as in vLLM's parsers
`deepseek_r1` and `qwen3`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal, NamedTuple

from gateway.parsers.tools.events import Content, Reasoning


class Tags(NamedTuple):
    """The tags around the reasoning.

    The detokenizer must output these tags even if they are special tokens.
    """

    opening: str
    closing: str


ReasoningParser = Literal[
    "deepseek_r1",
    "glm45",
    "granite",
    "kimi",
    "kimi_k2",
    "minimax_m2",
    "mistral",
    "nemotron_v3",
    "qwen3",
    "seed_oss",
]

THINK = Tags("<think>", "</think>")

# The keys are the names of vLLM's parsers, except `kimi`, which is a name of SGLang.
TAGS: Mapping[ReasoningParser, Tags] = MappingProxyType(
    {
        # These tags are also those of Phi-4-reasoning, QwQ, DeepSeek V3.1 and many more models.
        "deepseek_r1": THINK,
        "glm45": THINK,
        "kimi_k2": THINK,
        "minimax_m2": THINK,
        "nemotron_v3": THINK,
        "qwen3": THINK,
        # Granite 3.2 uses plain words as tags.
        "granite": Tags("Here is my thought process:", "Here is my response:"),
        # Kimi-VL-Thinking uses these tags.
        "kimi": Tags("\u25c1think\u25b7", "\u25c1/think\u25b7"),
        # The tags of Magistral and Ministral are special tokens.
        "mistral": Tags("[THINK]", "[/THINK]"),
        "seed_oss": Tags("<seed:think>", "</seed:think>"),
    }
)


def guess(chat_template: str) -> Tags | None:
    """Return the reasoning tags that a chat template contains, or None if they are unknown."""
    return next((tags for tags in TAGS.values() if tags.closing in chat_template), None)


def is_open(prompt: str, tags: Tags) -> bool:
    """Return True if the prompt ends with the opening tag, so the output begins with reasoning."""
    return prompt.rstrip().endswith(tags.opening)


class ReasoningSplitter:
    """Splitter of one choice's text into reasoning and content.

    Text after an opening tag is reasoning even if the closing tag never comes. Set `starts_open` if
    the prompt ends with the opening tag. The text then begins with reasoning.
    """

    def __init__(self, tags: Tags = THINK, *, starts_open: bool = False) -> None:
        self._tags = tags
        self._starts_open = starts_open
        self.state: Literal["start", "reasoning", "content"] = "start"
        """Part of the response to which the next text belongs.

        The value is "start" while it is unknown if the response begins with reasoning.
        """
        self._held = ""
        # Whitespace at the beginning of the response, as a list of strings. Joining these strings
        # at each call would be slow if a model writes much whitespace.
        self._blank: list[str] = []

    def split(self, text: str) -> list[Reasoning | Content]:
        """Parse the next chunk of text, and return its events.

        Text that may belong to a tag is held back until more text arrives.
        """
        text, self._held = self._held + text, ""
        if self.state == "start":
            text = self._start(text)
        events: list[Reasoning | Content] = []
        if self.state == "reasoning":
            thought, text = self._thought(text)
            if thought:
                events.append(Reasoning(thought))
        if text:
            events.append(Content(text))
        return events

    def finish(self) -> list[Reasoning | Content]:
        """Finish parsing. Return an event for the text that was held back, if there is any."""
        held, self._held = "".join(self._blank) + self._held, ""
        if not held:
            return []
        thinking = self.state == "reasoning" or self._starts_open
        return [Reasoning(held) if thinking else Content(held)]

    def _start(self, text: str) -> str:
        """Decide if the output begins with reasoning. Return the text without an opening tag.

        If more text is needed for this decision, return "" and hold the text back.
        """
        opening = self._tags.opening
        stripped = text.lstrip()
        self._blank.append(text[: len(text) - len(stripped)])
        opened = stripped.startswith(opening)
        if not opened and opening.startswith(stripped):
            self._held = stripped
            return ""
        blank = "".join(self._blank)
        self._blank.clear()
        self.state = "reasoning" if opened or self._starts_open else "content"
        return stripped.removeprefix(opening) if opened else blank + stripped

    def _thought(self, text: str) -> tuple[str, str]:
        """Return the reasoning before the closing tag, and the content after the tag.

        Hold back the end of the text if it may be the beginning of the closing tag.
        """
        closing = self._tags.closing
        thought, found, content = text.partition(closing)
        if found:
            self.state = "content"
            return thought, content
        keep = max(size for size in range(len(closing)) if text.endswith(closing[:size]))
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], ""

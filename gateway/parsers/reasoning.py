"""Splits what a model thinks, `<think>...</think>`, from what it answers, while it is generated.

Only a block that opens the output is reasoning. Whitespace stays as it is on both sides of the
closing tag, as in vLLM's parsers `deepseek_r1` and `qwen3`; only that before the opening tag is
dropped.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from gateway.parsers.tools.events import Content, Reasoning


class Tags(NamedTuple):
    """The tags around the reasoning. Detokenizing must not skip them where they are special."""

    opening: str
    closing: str


THINK = Tags("<think>", "</think>")
# Magistral, Ministral: special tokens.
MISTRAL_THINK = Tags("[THINK]", "[/THINK]")


def guess(chat_template: str) -> Tags | None:
    """The tags that a chat template knows; None if its model does not think in tags."""
    return next((tags for tags in (THINK, MISTRAL_THINK) if tags.closing in chat_template), None)


def is_open(prompt: str, tags: Tags) -> bool:
    """Whether the prompt ends within reasoning, so that the output begins there."""
    return prompt.rstrip().endswith(tags.opening)


class ReasoningSplitter:
    """Splits one choice's text. Reasoning that is not closed by the end stays reasoning."""

    def __init__(self, tags: Tags = THINK, *, starts_open: bool = False) -> None:
        self._tags = tags
        self._starts_open = starts_open
        self._state: Literal["start", "reasoning", "content"] = "start"
        self._held = ""

    def split(self, text: str) -> list[Reasoning | Content]:
        """Consumes generated text, cut anywhere; returns what became certain."""
        text, self._held = self._held + text, ""
        if self._state == "start":
            text = self._start(text)
        events: list[Reasoning | Content] = []
        if self._state == "reasoning":
            thought, text = self._thought(text)
            if thought:
                events.append(Reasoning(thought))
        if text:
            events.append(Content(text))
        return events

    def finish(self) -> list[Reasoning | Content]:
        """Ends the text: returns what was held back."""
        held, self._held = self._held, ""
        if not held:
            return []
        thinking = self._state == "reasoning" or self._starts_open
        return [Reasoning(held) if thinking else Content(held)]

    def _start(self, text: str) -> str:
        """Decides how the output begins; holds everything back until then."""
        opening = self._tags.opening
        stripped = text.lstrip()
        if stripped.startswith(opening):
            self._state = "reasoning"
            return stripped.removeprefix(opening)
        if opening.startswith(stripped):
            self._held = text
            return ""
        self._state = "reasoning" if self._starts_open else "content"
        return text

    def _thought(self, text: str) -> tuple[str, str]:
        """Cuts reasoning off the text; returns it and the content after the closing tag."""
        closing = self._tags.closing
        thought, found, content = text.partition(closing)
        if found:
            self._state = "content"
            return thought, content
        keep = max(size for size in range(len(closing)) if text.endswith(closing[:size]))
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], ""

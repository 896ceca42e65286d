class StopStrings:
    """Search for the first stop string in streamed text, even if it extends over several chunks.

    The end of a chunk is held back as long as it may be the beginning of a stop string.
    """

    def __init__(self, stop: tuple[str, ...], *, include: bool = False) -> None:
        self._stop = stop
        self._include = include
        self._longest = max(map(len, stop), default=0)
        self._held = ""

    def split_at_stop(self, text: str) -> tuple[str, str | None]:
        """Return the text that may be sent, and the stop string that was found, if any.

        If several stop strings match, the first match is used. If they match at the same position,
        the longest match is used. The returned text ends before the stop string, or after it if
        `include` is set.
        """
        if not self._stop:
            return text, None
        text = self._held + text
        matches = [(i, -len(s), s) for s in self._stop if (i := text.find(s)) >= 0]
        if matches:
            self._held = ""
            start, length, found = min(matches)
            return text[: start - length if self._include else start], found
        keep = self._count_undecided(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], None

    def skip(self, text: str) -> str:
        """Return `text` without searching it for stop strings.

        Callers use this method for the first `min_tokens` tokens, at which a stop string must not
        end the response.
        """
        return text

    def end(self, text: str) -> tuple[str, str | None]:
        """Process the last text. Return the same as `split_at_stop`, but hold no text back."""
        shown, stopped = self.split_at_stop(text)
        return shown + self.flush(), stopped

    def flush(self) -> str:
        """Return the text that was held back. Call this when no more text follows."""
        held, self._held = self._held, ""
        return held

    def _count_undecided(self, text: str) -> int:
        for size in range(min(self._longest - 1, len(text)), 0, -1):
            tail = text[-size:]
            if any(s.startswith(tail) for s in self._stop):
                return size
        return 0

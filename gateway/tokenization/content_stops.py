"""Search for stop strings in responses that may contain reasoning.

Only the content of a response is searched, not the reasoning. The classes receive the text of a
response with its markup. They return the same text, cut at the first stop string.
"""

from __future__ import annotations

from gateway.generation.options import GenerationParams
from gateway.parsers.harmony import HarmonyParser
from gateway.parsers.reasoning import ReasoningSplitter, Tags
from gateway.parsers.tools.events import Content
from gateway.tokenization.stop_strings import StopStrings


def make_stops(params: GenerationParams) -> StopStrings | TaggedStops | HarmonyStops:
    """Return the object that searches the text of one choice for stop strings."""
    stops = StopStrings(params.stop, include=params.include_stop)
    form = params.message
    if not params.stop or form is None or not form.has_reasoning:
        return stops
    if form.reasoning is not None:
        return TaggedStops(stops, form.reasoning, starts_open=form.reasoning_open)
    return HarmonyStops(stops, form.channel or "", calls=form.tools is not None)


class TaggedStops:
    """Search for stop strings after the closing tag of the reasoning.

    A text without reasoning is searched from its beginning. The first text is held back as long as
    it may be the beginning of the opening tag.
    """

    def __init__(self, stops: StopStrings, tags: Tags, *, starts_open: bool) -> None:
        self._stops = stops
        self._splitter = ReasoningSplitter(tags, starts_open=starts_open)
        self._starts_open = starts_open
        # Held-back text that may be the start of the opening tag. This is a list because joining
        # strings at each call would be slow if a model writes much whitespace first.
        self._undecided: list[str] = []

    def split_at_stop(self, text: str) -> tuple[str, str | None]:
        """Return the text that may be sent, and the stop string that was found, if any."""
        if self._splitter.state == "content":
            return self._stops.split_at_stop(text)
        before, content = self._split(text)
        if self._splitter.state == "start":
            self._undecided.append(content)
            return "", None
        shown, stopped = self._stops.split_at_stop(content)
        return before + shown, stopped

    def skip(self, text: str) -> str:
        if self._splitter.state != "content":
            self._splitter.split(text)
        return text

    def end(self, text: str) -> tuple[str, str | None]:
        before, stopped = self.split_at_stop(text)
        if stopped is not None:
            return before, stopped
        undecided = "".join(self._undecided)
        if self._starts_open:
            return before + undecided + self._stops.flush(), None
        shown, stopped = self._stops.end(undecided)
        return before + shown, stopped

    def _split(self, text: str) -> tuple[str, str]:
        """Join the held-back text and `text`. Return the reasoning with its tags, and the content.

        If it is still unknown if the response begins with the opening tag, return ("", `text`).
        """
        size = sum(len(e.text) for e in self._splitter.split(text) if isinstance(e, Content))
        if self._splitter.state == "start":
            return "", text
        text = "".join([*self._undecided, text])
        self._undecided.clear()
        # Limit the start to 0, because `size` may exceed the length of `text`: the splitter may
        # also return text that was passed to `skip` earlier.
        start = max(len(text) - size, 0)
        return text[:start], text[start:]


class HarmonyStops(HarmonyParser):
    """Search for stop strings in harmony messages, except reasoning. Tool calls are searched, too.

    Headers and markers are not searched. A stop string that extends over two messages is not found.
    """

    def __init__(self, stops: StopStrings, open_header: str, *, calls: bool) -> None:
        super().__init__(open_header, calls=calls)
        self._stops = stops
        self._stopped: str | None = None
        self._matches = True
        self._shown: list[str] = []
        self._pending = ""  # text that may be a header, until the header is complete
        self._written = ""  # content that the parser has found in the current piece of text

    def split_at_stop(self, text: str) -> tuple[str, str | None]:
        """Return the text that may be sent, and the stop string that was found, if any."""
        self._matches = True
        self.parse(text)
        return self._take_shown(), self._stopped

    def skip(self, text: str) -> str:
        self._matches = False
        self.parse(text)
        return self._take_shown()

    def end(self, text: str) -> tuple[str, str | None]:
        before, _ = self.split_at_stop(text)
        self._written = ""
        self.finish()
        self._add(self._pending + self._held)
        self._show(self._stops.flush())
        return before + self._take_shown(), self._stopped

    def _take_shown(self) -> str:
        shown = "".join(self._shown)
        self._shown.clear()
        return shown

    def _read(self, text: str) -> None:
        self._written = ""
        super()._read(text)
        if self._header is None:
            self._add(self._pending + text)
            self._pending = ""
        else:
            self._pending += text

    def _mark(self, marker: str) -> None:
        self._show(self._stops.flush())
        self._written = ""
        super()._mark(marker)
        self._add(self._pending)
        self._pending = ""
        self._show(self._stops.flush() + marker)

    def _write(self, text: str) -> None:
        self._written += text

    def _add(self, text: str) -> None:
        """Append text to the text that may be sent, up to a stop string.

        `text` may begin with a header. Only the content after the header is searched. The parser
        has stored this content in `_written`.
        """
        content = ""
        if self._matches and self._kind != "reasoning" and text.endswith(self._written):
            content = self._written
        self._show(text.removesuffix(content))
        if content and self._stopped is None:
            shown, self._stopped = self._stops.split_at_stop(content)
            self._shown.append(shown)

    def _show(self, text: str) -> None:
        if self._stopped is None:
            self._shown.append(text)

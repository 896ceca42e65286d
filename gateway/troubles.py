"""Current problems of this process, for `/health/ready` and the operators' page.

Each problem has a type, its `kind`, which is a constant of the code. A problem may concern many
items, such as adapters. At most 20 items are listed, and one more entry has the number of the other
items.

See decision 009 in docs/decisions.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

log = logging.getLogger(__name__)

MAX_ITEMS_OF_KIND = 20
"""Maximum number of listed items with the same kind of problem."""
MAX_CHARS = 1000
MAX_ITEM_CHARS = 200
_OTHERS = "others"


@dataclass(frozen=True, slots=True)
class Trouble:
    """A current problem.

    Attributes:
        level: A level of `logging`, WARNING or above.
        text: Description of the problem, and advice.
        since: Start of the problem, in seconds since 1970.
        times: Number of occurrences; 0 if they are not counted.
        last: Details of the last occurrence.
    """

    level: int
    text: str
    since: float
    times: int = 0
    last: str = ""

    def facts(self) -> dict[str, object]:
        facts: dict[str, object] = {
            "level": logging.getLevelName(self.level).lower(),
            "text": self.text,
            "since": round(self.since, 2),
        }
        if self.times:
            facts["times"] = self.times
        if self.last:
            facts["last"] = self.last
        return facts


class Troubles:
    """The current problems of one process. Not thread-safe: use it on one event loop."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._current: dict[str, dict[str, Trouble]] = {}
        self._last_texts: dict[str, tuple[int, Mapping[str, str]]] = {}

    def hold(
        self,
        kind: str,
        level: int,
        text: str,
        *,
        times: int = 0,
        last: str = "",
        logs: bool = True,
        exc_info: bool = False,
    ) -> None:
        """Add or update a problem that has no list of items. Log a new problem or a changed text.

        Args:
            kind: Name of the problem, a constant of the code, never external input.
            level: Level of the log line.
            text: Description of the problem, and advice.
            times: Number of occurrences; changes are not logged.
            last: Details of the last occurrence; changes are not logged.
            logs: False if the caller logs the problem.
            exc_info: True to log the traceback of the current exception.
        """
        known = self._current.get(kind, {}).get("")
        trouble = Trouble(level, _clean(text), self._clock(), times, _clean(last, MAX_ITEM_CHARS))
        if known is not None:
            trouble = replace(trouble, since=known.since)
        if logs and (known is None or (known.text, known.level) != (trouble.text, level)):
            more = f"; the last: {trouble.last}" if trouble.last else ""
            log.log(level, "%s%s", trouble.text, more, exc_info=exc_info)
        self._current[kind] = {"": trouble}

    def hold_each(
        self, kind: str, level: int, texts: Mapping[str, str], *, logs: bool = True
    ) -> None:
        """Replace all problems of this kind by one problem for each item in `texts`.

        `texts` maps each item to a description of its problem.
        """
        if self._last_texts.get(kind) == (level, texts):
            return
        before, now = self._current.pop(kind, {}), self._clock()
        if not texts:
            self._last_texts.pop(kind, None)
        else:
            self._last_texts[kind] = level, dict(texts)
            shown = {
                _clean(item, MAX_ITEM_CHARS): texts[item] for item in _select_listed(texts, before)
            }
            if others := len(texts) - len(shown):
                shown[_OTHERS] = f"{others} more of the same kind ({kind.replace('_', ' ')})"
            current = {}
            for item, text in shown.items():
                old = before.get(item)
                current[item] = Trouble(level, _clean(text), now if old is None else old.since)
                if logs and (old is None or old.text != current[item].text):
                    log.log(level, "%s", current[item].text)
            self._current[kind] = current
        if logs:
            for item in before.keys() - self._current.get(kind, {}).keys():
                log.info("over: %s", before[item].text)

    def clear(self, kind: str, *, logs: bool = True) -> None:
        """Remove a problem with all its items. Log the end of the problem if `logs` is True."""
        self._last_texts.pop(kind, None)
        for trouble in self._current.pop(kind, {}).values():
            if logs:
                log.info("over: %s", trouble.text)

    def facts(self) -> dict[str, dict[str, object]]:
        """Return all current problems for JSON, by ``KIND ITEM``, the most severe problem first."""
        found = [
            (f"{kind} {item}".rstrip(), trouble)
            for kind, items in self._current.items()
            for item, trouble in items.items()
        ]
        found.sort(key=lambda each: (-each[1].level, each[1].since, each[0]))
        return {name: trouble.facts() for name, trouble in found}


def _select_listed(texts: Mapping[str, str], before: Mapping[str, Trouble]) -> list[str]:
    """Return at most `MAX_ITEMS_OF_KIND` items. Items that are already listed are preferred."""
    return sorted(texts, key=lambda item: (item not in before, item))[:MAX_ITEMS_OF_KIND]


def _clean(text: str, max_chars: int = MAX_CHARS) -> str:
    """Return the text as one line of at most `max_chars` characters, without control characters.

    Control characters are removed because a terminal might interpret them.
    """
    if len(text) > max_chars:
        text = f"{text[: max_chars - 1]}…"
    text = "; ".join(line.strip() for line in text.splitlines() if line.strip())
    return "".join(each if each.isprintable() else "�" for each in text)

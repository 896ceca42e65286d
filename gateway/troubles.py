"""Current problems of this process, for `/health/ready` and the operators' page.

Each problem has a kind, which is a constant of the code, so there are few kinds. A kind of problem
may hold for many items, such as adapters: some items are listed, and one entry counts the others.

See decision 009 in docs/decisions.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

log = logging.getLogger(__name__)

MAX_ITEMS_OF_KIND = 20
"""Maximum number of listed items of one kind."""
MAX_CHARS = 1000
MAX_ITEM_CHARS = 200
_OTHERS = "others"


@dataclass(frozen=True, slots=True)
class Trouble:
    """A condition that holds.

    Attributes:
        level: A level of `logging`, WARNING or above.
        text: What is wrong, and what to do.
        since: When the condition began, in seconds since 1970.
        times: How often the condition occurred; 0 if not counted.
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
    """The conditions that hold in one process. Not thread-safe: use from one event loop."""

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
        """Report that a condition holds. Its beginning and changes of its text are logged.

        Args:
            kind: A constant of the code, never external input.
            level: The level of the log line.
            text: What is wrong, and what to do.
            times: How often the condition has occurred; changes are not logged.
            last: Details of the last occurrence; changes are not logged.
            logs: False if the caller logs the condition.
            exc_info: Log the traceback of the current exception.
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
        """Report all items for which a condition holds now.

        `texts` maps each item to what is wrong with it. The condition ends for all other items.
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
        """Report that a condition no longer holds for any item. Its end is logged."""
        self._last_texts.pop(kind, None)
        for trouble in self._current.pop(kind, {}).values():
            if logs:
                log.info("over: %s", trouble.text)

    def facts(self) -> dict[str, dict[str, object]]:
        """Return the facts of each condition that holds, by kind and item, the most severe
        first."""
        found = [
            (f"{kind} {item}".rstrip(), trouble)
            for kind, items in self._current.items()
            for item, trouble in items.items()
        ]
        found.sort(key=lambda each: (-each[1].level, each[1].since, each[0]))
        return {name: trouble.facts() for name, trouble in found}


def _select_listed(texts: Mapping[str, str], before: Mapping[str, Trouble]) -> list[str]:
    """Return at most `MAX_ITEMS_OF_KIND` of the items. Items listed before are preferred."""
    return sorted(texts, key=lambda item: (item not in before, item))[:MAX_ITEMS_OF_KIND]


def _clean(text: str, max_chars: int = MAX_CHARS) -> str:
    """Return the text as one line of at most `max_chars` characters, without control characters.

    A terminal or page might interpret control characters.
    """
    if len(text) > max_chars:
        text = f"{text[: max_chars - 1]}…"
    text = "; ".join(line.strip() for line in text.splitlines() if line.strip())
    return "".join(each if each.isprintable() else "�" for each in text)

"""A process that compiles guides which strangers wrote, so that nothing else has to.

`python -m guides.worker` reads one request a line, ``[kind, text, backend]`` in JSON, and answers
each with a line: ``[reason, size]``, where `reason` says why it is no guide, null if it is one, and
`size` is the memory in bytes that the process has now. A guide that takes more CPU time or memory
than it may ends the process by a signal, and so may one that breaks the compiler: that is why it
is one.
"""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from guides.grammar import to_grammar
from guides.kinds import Backend, Kind
from guides.limits import check
from guides.reasons import NOTHING_FITS, reason

CPU_S = 2
"""A usual schema takes 2 ms, and the largest that `limits` lets pass some hundred."""
_MEMORY = 1 << 30  # address space; the process itself takes 100 MiB of it


class Checker:
    """Compiles for a vocabulary of single bytes: whether a guide is one depends on no other."""

    def __init__(self) -> None:
        self._bytes = LLTokenizer("byte")
        # With the parser's state an error would be long and mean nothing to a client.
        self._limits = LLParserLimits(verbose_errors=False)

    def refusal(self, kind: Kind, text: str, backend: Backend) -> str | None:
        """Why the engine would fail on this guide; None if nothing is wrong with it."""
        try:
            check(kind, text, backend)
            grammar = to_grammar(kind, text, backend)
        except (ValueError, RecursionError) as error:
            return str(error)
        except MemoryError:
            return "it is too large"
        matcher = LLMatcher(self._bytes, grammar, log_level=0, limits=self._limits)
        mask = b"" if matcher.is_error() else matcher.compute_bitmask()
        if matcher.is_error():
            return reason(matcher.get_error())
        return None if any(mask) else NOTHING_FITS


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    checker = Checker()
    for line in sys.stdin.buffer:
        kind, text, backend = json.loads(line)
        used = resource.getrusage(resource.RUSAGE_SELF)
        end = int(used.ru_utime + used.ru_stime) + CPU_S + 1
        resource.setrlimit(resource.RLIMIT_CPU, (end, resource.RLIM_INFINITY))
        found = checker.refusal(kind, text, backend)
        print(json.dumps([found, _size()]), flush=True)


def _size() -> int:
    """Resident memory in bytes. `ru_maxrss` would begin with that of the parent."""
    resident = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    return int(resident) * resource.getpagesize()


if __name__ == "__main__":
    main()

"""Worker process that compiles guides. Compiling a client's guide may crash or exhaust the process.

`python -m guides.worker [RELEASE]` reads one request per line, ``[kind, text, backend,
best_effort]`` in JSON. It answers each request with a line ``[verdict, size]``. `verdict` has the
fields of `Verdict`, and `size` is the memory in bytes that the process uses now. In schemas below
the JSON paths `best_effort`, keywords that cannot be enforced are left out. If a guide exceeds the
limit of CPU time, a signal ends the process. A guide that crashes the compiler also ends the
process. The gateway then starts another process.

See decision 018 in docs/decisions.
"""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from guides import ebnf_xgrammar, expressions
from guides.grammar import to_grammar
from guides.kinds import Backend, Kind, Verdict
from guides.limits import check, check_length
from guides.reasons import NOTHING_FITS, reason
from guides.releases import find_costs
from guides.schema.enforcement import Enforcement
from guides.schema.keywords import pointer, step, subschemas
from guides.schema.lengths import write_lengths
from guides.schema.reading import Reader
from guides.schema.rewrite import rewrite, write
from guides.schema.sharing import share

CPU_S = 2
"""Limit of CPU time in seconds for each guide.

A typical schema takes 3 ms. The largest schema that `limits` accepts takes a few hundred ms.
"""
_MEMORY = 1 << 30  # limit of the address space in bytes; without a guide, the process takes 100 MiB
# Maximum number of subschemas that are compiled separately to find the cause of a refusal.
_MAX_PARTS = 100
# Maximum number of steps of the binary search in `Checker._lighten`. This is enough for 128 bounds.
# With more bounds, the search leaves out up to 1 % of them without need.
_MAX_ESTIMATES = 7


WhyNot = Callable[[str], str | None]


def _compiles(expression: str) -> str | None:
    return None


class Checker:
    """Checker that compiles guides before the gateway sends them to an engine.

    Guides are compiled for a vocabulary of single bytes, because the vocabulary does not affect
    their validity.
    """

    def __init__(self, release: str = "") -> None:
        """Create the checker.

        `release` is the release of xgrammar in the engines. If it is empty, the costs
        `guides.releases.NEWEST` are used, which suit all releases from 0.1.25 to 0.1.33.
        """
        self._costs = find_costs(release)
        self._bytes = LLTokenizer("byte")
        # Omit the parser's state from error messages: it is long, and clients cannot use it.
        self._limits = LLParserLimits(verbose_errors=False)

    def verdict(
        self, kind: Kind, text: str, backend: Backend, best_effort: Sequence[str] = ()
    ) -> Verdict:
        """Return whether a guide is accepted, and the text to send to the engine.

        Schemas are rewritten. In schemas below the JSON paths `best_effort`, keywords that cannot
        be enforced are left out.
        """
        try:
            check_length(text)
            if kind == "json_schema":
                return self._of_schema(json.loads(text), backend, best_effort)
            if backend == "xgrammar" and kind != "json":
                written_by = expressions if kind == "regex" else ebnf_xgrammar
                text = written_by.to_xgrammar(text)
        except (ValueError, RecursionError) as error:
            return Verdict(str(error), "")
        except MemoryError:
            return Verdict("it is too large", "")
        return Verdict(self._refusal(kind, text, backend), text)

    def _of_schema(self, schema: Any, backend: Backend, best_effort: Sequence[str]) -> Verdict:
        # Try twice if the schema has best-effort parts. In the second attempt, compile each regular
        # expression separately, and leave out the expressions that do not compile.
        for why_not in (_compiles, cache(partial(self._refusal, "regex", backend=backend))):
            enforcement = Enforcement(best_effort, self._costs)
            text = self._written(schema, backend, enforcement, why_not)
            if enforcement.bounds and not self._fits(text, backend):
                enforcement = self._lighten(schema, backend, best_effort, enforcement, why_not)
                text = self._written(schema, backend, enforcement, why_not)
            refusal = self._refusal("json_schema", text, backend)
            if refusal is None or not best_effort:
                break
        if refusal is not None:
            place, refusal = self._place(schema, backend, refusal)
            refusal = f"{place}: {refusal}"
        elif backend == "xgrammar" and "maxLength" in text:
            text = _dumped(write_lengths(json.loads(text), self._costs.length_form))
        return Verdict(refusal, text, enforcement.left_out, enforcement.left_out_more)

    def _lighten(
        self,
        schema: Any,
        backend: Backend,
        best_effort: Sequence[str],
        full: Enforcement,
        why_not: WhyNot,
    ) -> Enforcement:
        """Return a policy that leaves out as few bounds as necessary to pass `guides.limits.check`.

        The most costly bounds in `full.bounds` are left out first. Equal bounds of several schemas
        are separate entries there, although they are compiled only once.
        """
        heaviest = sorted(full.bounds)[::-1]
        fewest, most = 1, len(heaviest)
        for _ in range(_MAX_ESTIMATES):
            if fewest == most:
                break
            count = (fewest + most) // 2
            found = Enforcement(best_effort, self._costs, frozenset(heaviest[:count]))
            if self._fits(self._written(schema, backend, found, why_not), backend):
                most = count
            else:
                fewest = count + 1
        return Enforcement(best_effort, self._costs, frozenset(heaviest[:most]))

    def _fits(self, text: str, backend: Backend) -> bool:
        """Return True if a rewritten schema is within the limits."""
        try:
            check("json_schema", text, backend, self._costs)
        except ValueError:
            return False
        return True

    def _written(
        self, schema: Any, backend: Backend, enforcement: Enforcement, why_not: WhyNot = _compiles
    ) -> str:
        written = write(Reader(schema, backend, enforcement, why_not))
        return _dumped(share(written, self._costs) if backend == "xgrammar" else written)

    def _place(self, schema: Any, backend: Backend, refusal: str) -> tuple[str, str]:
        """Return (JSON path, reason) of the smallest subschema that the compiler refuses.

        If there is no such subschema, return the path of the schema and `refusal`.
        """
        place, left = "$", _MAX_PARTS
        keys: list[str | int] = []
        parts = iter(subschemas(schema))
        while (found := next(parts, None)) is not None and left > 0:
            left -= 1
            below, part = found
            try:
                text = _dumped(rewrite(schema, backend, pointer([*keys, *below])))
                alone = self._refusal("json_schema", text, backend)
            except ValueError:  # this subschema cannot be compiled separately
                continue
            if alone is not None:
                place, refusal, keys = step(place, *below), alone, [*keys, *below]
                parts = iter(subschemas(part))
        return place, refusal

    def _refusal(self, kind: Kind, text: str, backend: Backend) -> str | None:
        try:
            check(kind, text, backend, self._costs)
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


def _dumped(schema: Any) -> str:
    return json.dumps(schema, ensure_ascii=False, separators=(",", ":"))


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    checker = Checker(*sys.argv[1:])
    for line in sys.stdin.buffer:
        kind, text, backend, best_effort = json.loads(line)
        used = resource.getrusage(resource.RUSAGE_SELF)
        end = int(used.ru_utime + used.ru_stime) + CPU_S + 1
        resource.setrlimit(resource.RLIMIT_CPU, (end, resource.RLIM_INFINITY))
        found = checker.verdict(kind, text, backend, best_effort)
        print(json.dumps([found, _size()]), flush=True)


def _size() -> int:
    """Return the resident memory of this process in bytes.

    `ru_maxrss` cannot be used, because it includes the parent's memory at the time of the fork.
    """
    resident = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    return int(resident) * resource.getpagesize()


if __name__ == "__main__":
    main()

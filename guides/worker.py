"""A process that compiles guides which strangers wrote, so that nothing else has to.

`python -m guides.worker [RELEASE]` reads one request a line, which is
``[kind, text, backend, best_effort]`` in JSON, and answers each with a line: ``[verdict, size]``,
where `verdict` has the fields of `Verdict`, and `size` is the memory in bytes that the process has
now. Under the JSON paths `best_effort`, what
cannot be enforced of a schema is left out. A guide that takes more CPU time or memory than it may
ends the process by a signal, and so may one that breaks the compiler: that is why it is one.

See decision 018 in docs/decisions.
"""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Callable, Sequence
from functools import partial
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
"""A usual schema takes 3 ms, and the largest that `limits` lets pass some hundred."""
_MEMORY = 1 << 30  # address space; the process itself takes 100 MiB of it
# So many parts of a schema are compiled to find the one that is wrong.
_MAX_PARTS = 100
_MAX_BOUND_COSTS_US = (50_000, 10_000, 2_000, 500)


WhyNot = Callable[[str], str | None]


def _compiles(expression: str) -> str | None:
    return None


class Checker:
    """Compiles for a vocabulary of single bytes: whether a guide is one depends on no other."""

    def __init__(self, release: str = "") -> None:
        """`release` is that of the engines' xgrammar; empty if it may be any since 0.1.25."""
        self._costs = find_costs(release)
        self._bytes = LLTokenizer("byte")
        # With the parser's state an error would be long and mean nothing to a client.
        self._limits = LLParserLimits(verbose_errors=False)

    def verdict(
        self, kind: Kind, text: str, backend: Backend, best_effort: Sequence[str] = ()
    ) -> Verdict:
        """Return what becomes of a guide; the schema of one is written anew.

        Under the JSON paths `best_effort`, what cannot be enforced of a schema is left out.
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
        enforcement = Enforcement(best_effort)
        text = self._written(schema, backend, enforcement)
        refusal = self._refusal("json_schema", text, backend)
        if refusal is not None and best_effort and backend == "xgrammar":
            # Bounds that take long to compile are left out, the heaviest first.
            for max_cost in _MAX_BOUND_COSTS_US:
                lighter = Enforcement(best_effort, self._costs, max_cost)
                written = self._written(schema, backend, lighter)
                if (refusal := self._refusal("json_schema", written, backend)) is None:
                    text, enforcement = written, lighter
                    break
        if refusal is not None and best_effort:
            # Expressions are compiled alone where the schema as a whole does not compile.
            enforcement = Enforcement(best_effort, self._costs, _MAX_BOUND_COSTS_US[-1])
            why_not = partial(self._refusal, "regex", backend=backend)
            text = self._written(schema, backend, enforcement, why_not)
            refusal = self._refusal("json_schema", text, backend)
        if refusal is not None:
            place, refusal = self._place(schema, backend, refusal)
            refusal = f"{place}: {refusal}"
        elif backend == "xgrammar" and "maxLength" in text:
            text = _dumped(write_lengths(json.loads(text), self._costs.length_form))
        return Verdict(refusal, text, enforcement.left_out, enforcement.left_out_more)

    def _written(
        self, schema: Any, backend: Backend, enforcement: Enforcement, why_not: WhyNot = _compiles
    ) -> str:
        written = write(Reader(schema, backend, enforcement, why_not))
        return _dumped(share(written, self._costs) if backend == "xgrammar" else written)

    def _place(self, schema: Any, backend: Backend, refusal: str) -> tuple[str, str]:
        """The JSON path of the smallest part that alone is refused by the compiler, and why."""
        place, left = "$", _MAX_PARTS
        keys: list[str | int] = []
        parts = iter(subschemas(schema))
        while (found := next(parts, None)) is not None and left > 0:
            left -= 1
            below, part = found
            try:
                text = _dumped(rewrite(schema, backend, pointer([*keys, *below])))
                alone = self._refusal("json_schema", text, backend)
            except ValueError:  # of no use without what stands beside it
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
    """Resident memory in bytes. `ru_maxrss` would begin with that of the parent."""
    resident = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    return int(resident) * resource.getpagesize()


if __name__ == "__main__":
    main()

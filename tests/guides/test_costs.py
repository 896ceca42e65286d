"""CPU time of each xgrammar release to compile the guides that the gateway accepts.

`python -m tests.guides.test_costs SEED COUNT` compiles COUNT random guides with each release, for
vocabularies of 32,000 and 128,000 tokens, and prints the slowest.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest

from gateway.parsers.tools.forced import calls_guide
from guides.automaton import cost_of
from guides.ebnf import parts_of
from guides.expressions import parts_of as parts_of_expression
from guides.kinds import Kind
from guides.limits import MAX_COST_US
from guides.releases import find_costs
from guides.schema.costs import costs_of
from guides.worker import Checker
from tests.support.random_guides import random_guide
from tests.support.xgrammar_wheels import compile_guides, install_release, install_vocabulary

RELEASES = {"0.1.25": "", "0.1.32": "", "0.2.8": "0.2.8"}
"""Value of GATEWAY_XGRAMMAR_RELEASE by xgrammar release."""
MAX_CPU_S = {32_000: 0.5, 128_000: 1.5}
SCHEMAS = Path(__file__).parents[1] / "data" / "schemas"
STRING = {"type": "string"}
FORMATS = (
    "date",
    "time",
    "date-time",
    "duration",
    "email",
    "hostname",
    "ipv4",
    "ipv6",
    "uri",
    "uuid",
)
SAFE = 2**53 - 1
Guide = tuple[Kind, str]


def _object(properties: list[Any], **more: Any) -> Guide:
    named = {f"p{number}": schema for number, schema in enumerate(properties)}
    schema = {"type": "object", "properties": named, "required": list(named), **more}
    return "json_schema", json.dumps(schema)


def _range(digits: int, number: int = 0) -> dict[str, Any]:
    low, high = int("1234567890123456789"[:digits]) + number, int("9876543210987654321"[:digits])
    return {"type": "integer", "minimum": low, "maximum": high - number}


def _length(most: int) -> dict[str, Any]:
    return {**STRING, "maxLength": most}


def _alternatives(parts: list[str]) -> str:
    return "(" + "|".join(parts) + ")"


# Each family is ordered by size, from certainly accepted to certainly refused.
FAMILIES: dict[str, list[Guide]] = {
    "integers of zod": [
        _object([{"type": "integer", "minimum": -SAFE, "maximum": SAFE}] * n) for n in (20, 60)
    ],
    "same ranges": [_object([_range(11)] * n) for n in (1, 20, 60, 140, 300)],
    "ranges": [_object([_range(11, i) for i in range(n)]) for n in (1, 5, 10, 12, 14, 20, 60)],
    "short ranges": [_object([_range(4, i) for i in range(n)]) for n in (10, 80, 120, 200)],
    "optional": [_object([STRING] * n, required=[]) for n in (50, 100, 150, 190, 210, 400, 700)],
    "open": [_object([STRING] * n, additionalProperties=True) for n in (2, 10, 20, 30, 200)],
    "lengths": [_object([_length(n)]) for n in (30, 100, 255, 900)],
    "several lengths": [_object([_length(5 + i) for i in range(n)]) for n in (2, 4, 6, 20)],
    "lengths from some on": [
        _object([{**_length(100), "minLength": n}]) for n in (1, 10, 20, 28, 80, 99)
    ],
    "decimals": [
        _object([{"type": "number", "minimum": round(i / 10, 1), "maximum": 9.9} for i in range(n)])
        for n in (5, 10, 60)
    ],
    "formats": [
        _object([{"anyOf": [{**STRING, "format": f}, {"type": "null"}]} for f in FORMATS] * n)
        for n in (1, 40, 700)
    ],
    "counts": [
        _object([{"type": "array", "items": STRING, "maxItems": 100 + i} for i in range(n)])
        for n in (1, 5, 10, 12, 100)
    ],
    "values": [
        ("json_schema", json.dumps({"enum": [f"value number {i}" for i in range(n)]}))
        for n in (100, 1000, 2000, 4000)
    ],
    "patterns": [
        _object([{**STRING, "pattern": f"^[a-z]{{1,{5 + i}}}-[0-9]+$"} for i in range(n)])
        for n in (1, 5, 15, 25, 60)
    ],
    "optional groups": [
        ("ebnf_grammar", "root ::= " + '("a"|"b")? ' * n) for n in (10, 20, 30, 40, 200)
    ],
    "optional classes": [("regex", "[a-z]?" * n) for n in (5, 10, 15, 20, 25, 30, 100)],
    "repeated classes": [("regex", f"[a-zA-Z0-9_ ]{{0,{n}}}") for n in (10, 40, 60, 1000)],
    "short repetitions": [("regex", "[a-zA-Z0-9_ ]{1,2}" * n) for n in (4, 8, 12, 16, 128)],
    "pairs": [("regex", "[a-zA-Z0-9_ ]{2}" * n) for n in (10, 20, 40, 96)],
    "optional second characters": [
        ("regex", "[a-zA-Z0-9_ ][a-zA-Z0-9_ ]?" * n) for n in (4, 8, 14, 24, 48)
    ],
    "references": [
        ("ebnf_grammar", f"root ::= {'( r1 {3,} r1 * ) ' * n}\nr1 ::= [^a] [^a] [^a]")
        for n in (1, 3, 5, 9, 27)
    ],
    "optional strings": [("ebnf_grammar", "root ::= " + '"ab"? ' * n) for n in (10, 20, 50, 200)],
    "counted strings": [
        ("ebnf_grammar", f'root ::= "abababab"{{0,{n}}} [a-z]*') for n in (3, 10, 100, 3000)
    ],
    "repeated references": [
        ("ebnf_grammar", f"root ::= r1{{1,{n}}}\nr1 ::= [^a]") for n in (4, 10, 40, 200)
    ],
    "open repetitions": [("regex", ".{3,}" * n) for n in (1, 3, 5, 7, 12)],
    "sequences of repetitions": [("regex", "([a-z]*[0-9]*)" * n) for n in (5, 10, 20, 50)],
    "ambiguous": [("regex", f"([a-z]|[a-z][a-z]){{1,{n}}}") for n in (5, 10, 20, 40, 200)],
    "nested": [("regex", "(" * n + "[a-z]" + "{1,3})" * n) for n in (2, 3, 4, 5, 7)],
    "chains": [
        (
            "ebnf_grammar",
            "\n".join(
                ["root ::= r0", *[f"r{i} ::= [a-z] r{i + 1}?" for i in range(n)], f"r{n} ::= [0-9]"]
            ),
        )
        for n in (5, 20, 80, 200, 1000)
    ],
    "words": [
        ("regex", _alternatives([f"word{i}" for i in range(n)]) + "{1,9}") for n in (5, 20, 50)
    ],
}


def accepted(
    guides: list[Guide], release: str = "", best_effort: tuple[str, ...] = ()
) -> list[Guide]:
    """Return the accepted guides as they are sent to an engine."""
    checker = Checker(release)
    verdicts = [
        (kind, checker.verdict(kind, text, "xgrammar", best_effort)) for kind, text in guides
    ]
    return [(kind, found.text) for kind, found in verdicts if found.refusal is None]


def too_slow(release: str, size: int, guides: list[Guide]) -> list[tuple[float, str]]:
    """Return the guides that exceed the CPU time limit of a release, or fail in it.

    The CPU time of a guide is the minimum of three, since other load only makes a compilation
    longer.
    """
    vocabulary = (str(install_vocabulary()), str(size))
    exceeding: list[tuple[float, str]] = []
    for run in range(3):
        found = compile_guides(install_release(release), guides, vocabulary)
        results = [(why, cpu, guide) for guide, (why, cpu) in zip(guides, found, strict=True)]
        exceeding += [(cpu, f"{why}: {text[:500]}") for why, cpu, (_, text) in results if why]
        slow = [(cpu, guide) for why, cpu, guide in results if not why and cpu > MAX_CPU_S[size]]
        if run == 2:
            exceeding += [(cpu, text[:500]) for cpu, (_, text) in slow]
        guides = [guide for _, guide in slow]
        if not guides:
            break
    return exceeding


@pytest.mark.slow
@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("size", MAX_CPU_S)
def test_the_largest_that_are_accepted_compile_in_time(release: str, size: int) -> None:
    families = list(FAMILIES.values())
    # Guides that compile in time for the larger vocabulary also do for the smaller one. As this
    # takes four times as long, each release compiles only a third of the families for the larger
    # one.
    largest = families[list(RELEASES).index(release) :: len(RELEASES)]
    families = largest if size > 32_000 else [each for each in families if each not in largest]
    guides = [guide for each in families for guide in accepted(each, RELEASES[release])[-1:]]
    assert too_slow(release, size, guides) == []


@pytest.mark.slow
@pytest.mark.parametrize("release", ["0.1.18", "0.1.25"])
def test_a_release_that_is_set_compiles_what_is_accepted_for_it(release: str) -> None:
    guides = [guide for family in FAMILIES.values() for guide in accepted(family, release)[-1:]]
    # Releases before 0.1.20 fail on repetition bounds of more than 32 bits.
    assert too_slow(release, 32_000, guides) == []


@pytest.mark.parametrize("name", FAMILIES)
def test_each_family_has_what_is_accepted_and_what_is_refused(name: str) -> None:
    found = len(accepted(FAMILIES[name]))
    everything = name == "integers of zod"
    assert found == len(FAMILIES[name]) if everything else 0 < found < len(FAMILIES[name])


@pytest.mark.slow
def test_random_guides_that_are_accepted_compile_in_time() -> None:
    found = accepted_random(random.Random(43), RANDOM_GUIDES)
    for number, release in enumerate(RELEASES):
        assert too_slow(release, 32_000, found[number :: len(RELEASES)]) == []


RANDOM_GUIDES = 120


def accepted_random(draw: random.Random, count: int, release: str = "") -> list[Guide]:
    """Return the accepted ones of `count` random guides. Schemas are best effort."""
    checker = Checker(release)
    found = []
    for _ in range(count):
        kind, text = random_guide(draw)
        verdict = checker.verdict(kind, text, "xgrammar", ["$"] if kind == "json_schema" else [])
        if verdict.refusal is None:
            found.append((kind, verdict.text))
    return found


def _written_by_programs() -> list[tuple[str, str, list[str]]]:
    """Return schemas with names, and the paths where they are best effort."""
    found = []
    for program in ("pydantic", "zod"):
        schemas = json.loads((SCHEMAS / f"{program}.json").read_text(encoding="utf-8"))
        found += [(f"{program} {name}", json.dumps(each), ["$"]) for name, each in schemas.items()]
    servers = json.loads((SCHEMAS / "mcp.json").read_text(encoding="utf-8"))
    for server, tools in servers.items():
        paths = [f"$.$defs.arguments{number}" for number in range(len(tools))]
        found.append((server, calls_guide(tools, parallel=True), paths))
    return found


def test_what_programs_write_is_served() -> None:
    checker = Checker()
    for name, text, best_effort in _written_by_programs():
        verdict = checker.verdict("json_schema", text, "xgrammar", best_effort)
        assert verdict.refusal is None, name


@pytest.mark.slow
@pytest.mark.parametrize("release", RELEASES)
def test_what_programs_write_compiles_in_time(release: str) -> None:
    checker = Checker()
    guides: list[Guide] = [
        ("json_schema", checker.verdict("json_schema", text, "xgrammar", best_effort).text)
        for _, text, best_effort in _written_by_programs()[list(RELEASES).index(release) :: 2]
    ]
    assert too_slow(release, 32_000, guides) == []


def test_bounds_that_no_double_exceeds_are_left_out() -> None:
    checker = Checker()
    for bounds in (
        {"minimum": -SAFE, "maximum": SAFE},
        {"minimum": -SAFE},
        {"exclusiveMaximum": SAFE + 1, "exclusiveMinimum": -SAFE - 1},
    ):
        verdict = checker.verdict(
            "json_schema", json.dumps({"type": "integer", **bounds}), "xgrammar"
        )
        assert verdict == (None, '{"type":"integer"}', (), 0)
    verdict = checker.verdict(
        "json_schema", json.dumps({"type": "integer", "minimum": 0, "maximum": SAFE}), "xgrammar"
    )
    assert verdict.text == '{"type":"integer","minimum":0}'
    wide = {"type": "integer", "minimum": -(2**63), "maximum": 2**64 - 1}
    assert checker.verdict("json_schema", json.dumps(wide), "xgrammar").text == '{"type":"integer"}'
    nothing = {"type": "integer", "minimum": SAFE + 1, "maximum": SAFE}
    assert checker.verdict("json_schema", json.dumps(nothing), "xgrammar").refusal is not None


def test_the_heaviest_bounds_are_left_out_of_a_schema_that_is_best_effort() -> None:
    checker = Checker()
    kind, text = _object([_length(900), _range(2), {"type": "array", "maxItems": 5}])
    assert checker.verdict(kind, text, "xgrammar").refusal is not None
    verdict = checker.verdict(kind, text, "xgrammar", ["$"])
    assert (verdict.refusal, verdict.left_out) == (None, ("$.properties.p0.maxLength",))
    assert '"maxItems":5' in verdict.text
    kind, text = _object([STRING] * 200, additionalProperties=True)
    verdict = checker.verdict(kind, text, "xgrammar", ["$"])
    assert (verdict.refusal, verdict.left_out) == (None, ("$.additionalProperties",))


@pytest.mark.parametrize(
    ("schemas", "left_out"),
    [
        ([_length(100), _length(4000)], ["p1.maxLength"]),
        ([_length(n) for n in (10, 11, 12, 13, 14)], ["p4.maxLength"]),
        ([_length(120), _length(4000), _length(60)], ["p1.maxLength"]),
        ([_range(11, number) for number in range(10)], []),
    ],
)
def test_as_few_bounds_as_possible_are_left_out(schemas: list[Any], left_out: list[str]) -> None:
    verdict = Checker().verdict(*_object(schemas), "xgrammar", ["$"])
    assert verdict.refusal is None
    assert list(verdict.left_out) == [f"$.properties.{each}" for each in left_out]


def test_equal_formats_are_compiled_once_and_the_heaviest_are_left_out() -> None:
    schemas = [{**STRING, "format": "ipv6", "title": str(number)} for number in range(40)]
    verdict = Checker().verdict(*_object(schemas), "xgrammar")
    assert verdict.refusal is None
    assert verdict.text.count('"ipv6"') == 1
    # In 0.1.18, an IPv6 address alone takes 0.4 s.
    kind, text = _object([{**STRING, "format": "ipv6"}, {**STRING, "format": "date"}])
    assert Checker("0.1.18").verdict(kind, text, "xgrammar").refusal is not None
    verdict = Checker("0.1.18").verdict(kind, text, "xgrammar", ["$"])
    assert (verdict.refusal, verdict.left_out) == (None, ("$.properties.p0.format",))


def test_wide_open_repetitions_in_a_row_are_refused_and_others_are_served() -> None:
    checker = Checker()
    for text in (
        ".{10,}",
        ".{40,}",
        "[a-z]{20,}-[0-9]{20,}-[a-z]{20,}",
        "(.{3,},){4}",
        ".{3,}" * 4,
    ):
        assert checker.verdict("regex", text, "xgrammar").refusal is None, text
    for text in (".{3,}" * 7, "(.{3,}){7}", "[^a]{2,}" * 12):
        assert checker.verdict("regex", text, "xgrammar").refusal is not None, text
    # xgrammar 0.1.25 compiles these in a third of the time.
    assert Checker("0.1.25").verdict("regex", ".{3,}" * 7, "xgrammar").refusal is None


def test_a_sign_after_a_string_repeats_all_of_it() -> None:
    costs = find_costs("")
    for text, group in (
        ('"ab"?', '("ab")?'),
        ('"abc"{0,9}', '("abc"){0,9}'),
        ('[a-z] ""?', "[a-z]"),
    ):
        both = [
            cost_of(parts_of(f"root ::= {each * 30}"), costs, is_ebnf=True)
            for each in (f"{text} ", f"{group} ")
        ]
        assert both[0] == both[1], text


def test_equal_formats_are_shared_only_where_references_are_cheaper() -> None:
    kind, text = _object([{**STRING, "format": "date-time"}] * 170)
    assert Checker().verdict(kind, text, "xgrammar").refusal is None


def test_only_the_pattern_that_does_not_compile_is_left_out() -> None:
    schemas = [
        {**STRING, "pattern": r"^(x)\1$"},
        {"type": "integer", "minimum": 0, "maximum": 99_999},
        _length(10),
    ]
    verdict = Checker().verdict(*_object(schemas), "xgrammar", ["$"])
    assert (verdict.refusal, verdict.left_out) == (None, ("$.properties.p0.pattern",))


def test_copies_of_nothing_take_no_time() -> None:
    assert cost_of(parts_of_expression("((){99999}){99999}"), find_costs("")) == 0


def test_an_error_says_what_is_too_large_and_what_is_allowed() -> None:
    refusal = Checker().verdict(*_object([_length(900)]), "xgrammar").refusal
    assert refusal == (
        "$.properties.p0: it would take xgrammar about 4.321 s to compile, 100% of it for lengths "
        "of strings; allowed: 0.25 s; use smaller or equal values of minLength and maxLength, or "
        "none"
    )


def test_a_schema_is_weighed_in_linear_time() -> None:
    for schema in ({"enum": ["x" * 60_000]}, {"anyOf": [{"const": n} for n in range(5_000)]}):
        assert costs_of(schema, find_costs("")).total() > MAX_COST_US


def main() -> None:
    seed, count = map(int, sys.argv[1:])
    for release, setting in RELEASES.items():
        guides = accepted_random(random.Random(seed), count, setting)
        print(f"{release}: {len(guides)} of {count} accepted")
        for size in MAX_CPU_S:
            vocabulary = (str(install_vocabulary()), str(size))
            found = compile_guides(install_release(release), guides, vocabulary)
            times = sorted(zip([cpu for _, cpu in found], guides, strict=True), reverse=True)
            print(f"{size} tokens: {sum(cpu for cpu, _ in times):.0f} s in all; slowest:")
            for cpu, (kind, text) in times[:5]:
                print(f"  {cpu:.3f} s {kind} {text[:200]}", flush=True)


if __name__ == "__main__":
    main()

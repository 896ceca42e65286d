"""Releases of xgrammar compile each guide that the gateway accepts.

`tests.guides.test_costs` measures how long that takes.
"""

from __future__ import annotations

import json
import random
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from guides.kinds import Kind
from guides.worker import Checker
from tests.support.xgrammar_wheels import RELEASES, compile_guides, install_release

pytestmark = pytest.mark.slow

IPV4 = r"((25[0-5]|(2[0-4]|1\d|[1-9]|)\d)\.){3}(25[0-5]|(2[0-4]|1\d|[1-9]|)\d)"
DECIMAL = r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"  # pydantic's pattern


@pytest.fixture(scope="module", params=RELEASES)
def folder(request: pytest.FixtureRequest) -> Path:
    """Return the folder of a release's wheel."""
    return install_release(request.param)


def compiled(folder: Path, guides: list[tuple[str, str]]) -> list[str | None]:
    """Return each guide's error in the release, or None if it compiles."""
    return [why for why, _ in compile_guides(folder, guides)]


ACCEPTED: list[tuple[Kind, Any]] = [
    *[("regex", text) for text in (IPV4, "(a|)b", "(|a)b", "a|", "|a", "(a||b)", "(|)b", "()", "")],
    *[("regex", text) for text in ("^", "^$", "(^|a)b", "(a|$)", "^a|b$", "(a|)+", "(a|){2}")],
    *[("regex", text) for text in ("a{0}b", "(?:a|b)", "(?<n>a)", "(?P<n>a|)b", "[]a]", "[^]]")],
    *[("regex", text) for text in ("[[]", "a]", "a+?", "a{2,3}?", r"\d+\.\w\s\/\-", "[a-]", "[.]")],
    ("json_schema", {"type": "string", "pattern": "^(a|)b$"}),
    ("json_schema", {"type": "string", "pattern": f"^{IPV4}$"}),
    ("json_schema", {"type": "string", "pattern": "^$"}),
    ("json_schema", {"patternProperties": {"^(|x_)[]a]+$": {"type": "integer"}}}),
    ("json_schema", {"type": "object", "patternProperties": {"^x(a*b?)+$": {}}}),
    ("ebnf_grammar", 'root ::= ("a" | ) "b"'),
    ("ebnf_grammar", 'root ::= (| "a") x\nx ::= | "b" ||\ny ::= ()'),
    ("ebnf_grammar", 'root ::= "a" |\n# end'),
    ("ebnf_grammar", 'root ::= # start\n "a"\n | x\n [b]? # end\nx ::=\n "c"'),
]
# Releases up to 0.1.18 overflow the stack on these guides. The gateway rewrites them.
OVERFLOWING: list[tuple[Kind, str]] = [
    *[("regex", text) for text in ("b(a?)*a", "(a?)*a", "b(a*){2,}", "b(a?|c{0,2})+", "b()*a")],
    ("json_schema", '{"type": "string", "pattern": "^(a?)*b$"}'),
    ("ebnf_grammar", 'root ::= "b" ("a"?)* "a"'),
    ("ebnf_grammar", 'root ::= "b" ("a"* "c"{0,2} | "d")+ "a"'),
    ("ebnf_grammar", 'root ::= ("a"?){2,} "b"'),
    ("ebnf_grammar", 'root ::= "b" x* "a"\nx ::= ""'),
    ("ebnf_grammar", 'root ::= "b" x* "a"\nx ::= y y\ny ::= "c"?'),
]
# Releases up to 0.1.18 overflow the stack on these guides too. The gateway refuses them.
RECURSIVE: list[tuple[Kind, str]] = [
    ("ebnf_grammar", 'root ::= root "a" | "b"'),
    ("ebnf_grammar", 'root ::= "b" x\nx ::= y x "c" | "d"\ny ::= "e"?'),
    (
        "json_schema",
        '{"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, {"type": "null"}]}}, "type": "object", '
        '"properties": {"x": {"$ref": "#/$defs/a"}}}',
    ),
]
# All releases fail on these guides. The gateway refuses them.
THROWN: list[tuple[Kind, str]] = [
    *[("regex", text) for text in ("a**", "(?=a)b", "(?!a)b", r"\bword\b", "[a--b]", "(", "[a")],
    ("ebnf_grammar", "root ::= x"),
    ("ebnf_grammar", 'root ::= ("a"'),
]
# Releases up to 0.1.25 fail on these guides. The gateway rewrites them.
REWRITTEN: list[tuple[Kind, str]] = [
    *[("regex", text) for text in ("(|a)b", "a|", "|a", "(a||b)", "(^|a)b", "(a|$)", "[]a]")],
    ("ebnf_grammar", 'root ::= ("a" | ) "b"'),
]


def test_each_release_compiles_what_is_accepted(folder: Path) -> None:
    checker = Checker()
    written: list[tuple[str, str]] = []
    for kind, guide in ACCEPTED + OVERFLOWING:
        text = guide if isinstance(guide, str) else json.dumps(guide)
        verdict = checker.verdict(kind, text, "xgrammar")
        assert verdict.refusal is None, (kind, text, verdict.refusal)
        written.append((kind, verdict.text))
    found = compiled(folder, written)
    assert dict(zip(written, found, strict=True)) == dict.fromkeys(written)


ODD: dict[str, Any] = {
    "type": "object",
    "properties": {
        "price": {"type": "number", "multipleOf": 0.01, "minimum": 0},
        "decimal": {"anyOf": [{"type": "number"}, {"type": "string", "pattern": DECIMAL}]},
        "tags": {"type": "array", "items": {"type": "string"}, "uniqueItems": True, "contains": {}},
        "name": {"type": "string", "not": {"const": "x"}, "format": "made-up"},
        "code": {"type": "string", "pattern": "^[A-Z]+-[0-9]+$", "maxLength": 9},
        "either": {"oneOf": [{"type": "integer"}, {"type": "number", "minimum": 0}]},
        "other": {"$ref": "https://example.com/other.json"},
        "words": {"type": "string", "pattern": r"\bx\b", "maxLength": 10**9},
    },
    "required": ["price", "tags"],
    "allOf": [{"if": {"required": ["name"]}, "then": {"required": ["code"]}}],
    "dependentSchemas": {"name": {"required": ["code"]}},
    "patternProperties": {"^(?=x)": {"type": "integer"}},
}


def test_each_release_compiles_what_is_best_effort(folder: Path) -> None:
    checker = Checker()
    written: list[tuple[str, str]] = []
    for name, schema in ODD["properties"].items():
        alone = json.dumps({"type": "object", "properties": {name: schema}})
        verdict = checker.verdict("json_schema", alone, "xgrammar", ["$"])
        assert (verdict.refusal, bool(verdict.left_out)) == (None, True), name
        written.append(("json_schema", verdict.text))
    verdict = checker.verdict("json_schema", json.dumps(ODD), "xgrammar", ["$"])
    assert (verdict.refusal, len(verdict.left_out)) == (None, 13), verdict.left_out
    written.append(("json_schema", verdict.text))
    found = compiled(folder, written)
    assert dict(zip(written, found, strict=True)) == dict.fromkeys(written)


def test_each_release_throws_on_what_is_refused(folder: Path) -> None:
    checker = Checker()
    assert all(checker.verdict(kind, text, "xgrammar").refusal for kind, text in THROWN)
    found = compiled(folder, list(THROWN))
    assert [guide for guide, why in zip(THROWN, found, strict=True) if why is None] == []


def test_older_releases_throw_on_what_is_rewritten(folder: Path) -> None:
    if folder.name.startswith("0.2"):
        pytest.skip("newer releases compile some of them")
    found = compiled(folder, list(REWRITTEN))
    assert [guide for guide, why in zip(REWRITTEN, found, strict=True) if why is None] == []


@pytest.mark.parametrize(("kind", "text"), OVERFLOWING + RECURSIVE)
def test_older_releases_overflow_on_what_begins_with_itself(
    folder: Path, kind: Kind, text: str
) -> None:
    if not folder.name.startswith(("0.1.13", "0.1.18")):
        pytest.skip("newer releases compile it")
    if (kind, text) in RECURSIVE:
        assert "itself" in str(Checker().verdict(kind, text, "xgrammar").refusal)
    with pytest.raises(subprocess.CalledProcessError) as raised:
        compiled(folder, [(kind, text)])
    assert raised.value.returncode == -signal.SIGSEGV


SIGNS = ("", "", "?", "*", "+", "{2,}", "{0,2}", "{2}", "{0,}", "{0}")


def _random_guide(draw: random.Random, kind: Kind, depth: int) -> str:
    """Return a random regex, or a grammar rule's body. Most of its parts may be empty."""
    choice = draw.random()
    if depth == 0 or choice < 0.4:
        characters = ("a", "b", "()", "[ab]")
        rules = ('"a"', '"b"', '""', "()", "[ab]", "x", "y", "z")
        return draw.choice(characters if kind == "regex" else rules) + draw.choice(SIGNS)
    parts = [_random_guide(draw, kind, depth - 1) for _ in range(draw.randint(2, 3))]
    if choice < 0.65:
        return ("" if kind == "regex" else " ").join(parts)
    return f"({'|'.join(parts)}{draw.choice(('', '|'))}){draw.choice(SIGNS)}"


def test_each_release_compiles_repetitions_of_what_may_be_empty(folder: Path) -> None:
    draw = random.Random(1)
    checker = Checker()
    accepted: dict[tuple[str, str], str] = {}
    while len(accepted) < 300:
        kind: Kind = draw.choice(("regex", "ebnf_grammar"))
        text = f"b{_random_guide(draw, kind, 3)}c"
        if kind == "ebnf_grammar":
            bodies = [_random_guide(draw, kind, 2) for _ in range(4)]
            text = f'root ::= "b" {bodies[0]} "c"\n' + "\n".join(
                [f"{name} ::= {body}" for name, body in zip("xyz", bodies[1:], strict=True)]
            )
        verdict = checker.verdict(kind, text, "xgrammar")
        if verdict.refusal is None:
            accepted[kind, verdict.text] = text
    found = compiled(folder, list(accepted))
    assert [text for text, why in zip(accepted.values(), found, strict=True) if why] == []

"""Check how the code is written: docstring openings, function names, class names, vocabulary.

`tests/data/words.json` has what is still to be mended. Its numbers and lists may only shrink:
`python -m tests.test_words` writes it again, and refuses to let anything in it grow.
"""

from __future__ import annotations

import ast
import io
import json
import re
import sys
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
ALLOWED = ROOT / "tests" / "data" / "words.json"
PRODUCT = (
    "gateway", "ops", "adapters", "certificates", "guides", "lora_store", "triton_repo", "demo",
    "bench", "docs", "deploy",
)  # fmt: skip

# A first sentence that begins so has no subject and no verb of its own.
_OPENING = re.compile(
    r"(?:As|Of|By|In|That|Those|What|Who|Whose|Whoever|Whatever|Whether|Where|None|Likewise|Such|It"
    r"|They|One|Another|So|To|With|From|How|Which|Until)\b"
)
# A function does something, so its name is a verb. `read`, `put` and `cut` are infinitives, too.
_PARTICIPLE = re.compile(
    r"_*(?:(?!need|feed|seed|embed|exceed|proceed|speed|shed)[a-z]+ed|told|said|made|kept|taken|given"
    r"|found|seen|sent|held|left|known|drawn|begun|done|written|built|shown|brought|whole|beyond)"
)
# Words that had a meaning of their own in this project. CONTRIBUTING.md has the field's words.
_PRIVATE = re.compile(
    r"\b(?:told|tells?|whoever|whatever|nobody|likewise|go(?:es|ing)? on|went on|lets? go|aside"
    r"|amiss|shall|(?<!in )places?|room|(?:un)?kept|whole|in turn|beyond|begun|brings?|brought"
    r"|say again|cold sends?|look after)\b",
    re.IGNORECASE,
)


def python_files() -> Iterator[Path]:
    for package in (*PRODUCT, "tests"):
        yield from sorted((ROOT / package).rglob("*.py"))


def docstrings(tree: ast.Module) -> Iterator[str]:
    """Yield the docstrings of a module, its classes and functions, and those below assignments."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if not isinstance(body, list):
            continue
        is_documented = isinstance(
            node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        )
        for before, each in zip([None, *body], body, strict=False):
            if not isinstance(each, ast.Expr) or not isinstance(each.value, ast.Constant):
                continue
            is_first = before is None and is_documented
            if isinstance(each.value.value, str) and (
                is_first or isinstance(before, ast.Assign | ast.AnnAssign)
            ):
                yield each.value.value.strip()


def findings() -> dict[str, Any]:
    """Return what is to be mended: numbers by file, names of functions, and of repeated classes."""
    openings: dict[str, int] = {}
    private: dict[str, int] = {}
    functions: dict[str, list[str]] = {}
    classes: dict[str, list[str]] = defaultdict(list)
    for path in python_files():
        name, source = path.relative_to(ROOT).as_posix(), path.read_text()
        tree = ast.parse(source)
        texts = list(docstrings(tree))
        if count := sum(map(bool, map(_OPENING.match, texts))):
            openings[name] = count
        tokens = tokenize.generate_tokens(io.StringIO(source).readline)
        texts += [token.string for token in tokens if token.type == tokenize.COMMENT]
        if count := len(_PRIVATE.findall(" ".join(texts))):
            private[name] = count
        if name.startswith("tests/"):
            continue
        nodes = list(ast.walk(tree))
        found = [
            node.name
            for node in nodes
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            and _PARTICIPLE.fullmatch(node.name)
        ]
        if found:
            functions[name] = sorted(found)
        for node in nodes:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                classes[node.name].append(name)
    repeated = {name: len(files) for name, files in sorted(classes.items()) if len(files) > 1}
    # Triton finds the Python backend's class by its name.
    repeated.pop("TritonPythonModel", None)
    return {
        "docstring openings": openings,
        "private words": private,
        "functions named by participles": functions,
        "classes of one name": repeated,
    }


def grown(now: dict[str, Any], allowed: dict[str, Any]) -> list[str]:
    """Return a line for each part of `now` that is more than `allowed` has."""
    lines = []
    for kind, by_name in now.items():
        for name, value in by_name.items():
            most = allowed[kind].get(name, [] if isinstance(value, list) else 0)
            if isinstance(value, list):
                extra = [each for each in set(value) if value.count(each) > most.count(each)]
                lines += [f"{kind}: {name}: {each}" for each in sorted(extra)]
            elif value > most:
                lines.append(f"{kind}: {name}: {value}, allowed {most}")
    return lines


def test_new_code_is_written_in_plain_words() -> None:
    assert not grown(findings(), json.loads(ALLOWED.read_text()))


def test_the_list_of_what_is_allowed_has_shrunk_with_the_code() -> None:
    assert not grown(json.loads(ALLOWED.read_text()), findings()), (
        "less is to be mended than the list says: run `python -m tests.test_words`"
    )


@pytest.mark.parametrize(
    ("source", "kind"),
    [
        ('"""What is known of a replica."""', "docstring openings"),
        ('LIMIT = 1\n"""Of each tenant."""', "docstring openings"),
        ("x = 1  # has the tenant's place", "private words"),
        ("class A:\n    def told(self): ...", "functions named by participles"),
    ],
)
def test_each_kind_is_found(
    source: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gateway").mkdir()
    (tmp_path / "gateway" / "new.py").write_text(source)
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    found = findings()
    assert [name for name, by_file in found.items() if by_file] == [kind]
    assert list(found[kind]) == ["gateway/new.py"]


def main() -> None:
    now = findings()
    if ALLOWED.exists() and (lines := grown(now, json.loads(ALLOWED.read_text()))):
        sys.exit("\n".join(lines))
    ALLOWED.write_text(json.dumps(now, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()

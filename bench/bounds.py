"""Check whether a request or a token has become more expensive: python -m bench.bounds [--write]

The command counts instructions and compares the counts with those in instructions.json. `--write`
stores the new counts instead; use it after a change that is worth its cost, or that reduced a
count. The counts apply to one build of Python. With another build, or without valgrind, nothing is
compared.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench.__main__ import main as measure

BOUNDS = Path(__file__).with_name("instructions.json")
_DEARER, _CHEAPER = 1.03, 0.9


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.bounds", description=__doc__)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="gateway-bounds-") as folder:
        measure(["--only", "instructions", "--quick", "--output", folder])
        results = json.loads((Path(folder) / "results.json").read_text(encoding="utf-8"))
    rows = results["parts"].get("instructions")
    if not rows:
        print(f"Not compared: {'; '.join(results['notes'])}")
        return 0
    found = {"python": sys.version, "thousand instructions of": _by_name(rows)}
    if options.write:
        BOUNDS.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
        return 0
    known = json.loads(BOUNDS.read_text(encoding="utf-8"))
    if known["python"] != found["python"]:
        print(f"Not compared: {BOUNDS.name} is of Python {known['python']}")
        return 0
    wrong = list(_find_exceeded(known["thousand instructions of"], _by_name(rows)))
    print("\n".join(wrong))
    return 1 if wrong else 0


def _by_name(rows: list[dict[str, Any]]) -> dict[str, float]:
    return {row["thousand instructions of"]: round(row["all"], 1) for row in rows}


def _find_exceeded(known: dict[str, float], found: dict[str, float]) -> list[str]:
    wrong = []
    for name in {**known, **found}:
        if name not in known or name not in found:
            wrong.append(f"{name}: found {found.get(name)}, known {known.get(name)}")
            continue
        ratio = found[name] / known[name]
        if not _CHEAPER <= ratio <= _DEARER:
            wrong.append(
                f"{name}: {found[name]:,} thousand instructions, {ratio:.3f} of the "
                f"{known[name]:,} in {BOUNDS.name}. If that is as it should be: "
                "python -m bench.bounds --write"
            )
    return wrong


if __name__ == "__main__":
    sys.exit(main())

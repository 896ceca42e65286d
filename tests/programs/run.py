"""The part of `python -m tests.programs` that runs without a network."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter
from pathlib import Path

from docs.rerun import set_loopback_up
from tests.programs.engine.stack import ScriptedStack, scripted_stack
from tests.programs.installed import Installed
from tests.programs.program import Result, run_program
from tests.programs.recorded import record

_COLUMNS = ("program", "version", "requests", "seconds", "result")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("installed", type=json.loads)
    parser.add_argument("--loopback-alone", action="store_true")
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--form", default="hermes")
    parsed = parser.parse_args()
    if parsed.loopback_alone:
        set_loopback_up()
    installed = [Installed.of(fields) for fields in parsed.installed]
    rows = [_COLUMNS]
    failed = False
    # A folder outside this repository, as programs read a surrounding repository's instructions and
    # git log.
    with (
        tempfile.TemporaryDirectory() as folder,
        scripted_stack(Path(folder), parsed.form) as stack,
    ):
        for each in installed:
            row, passed = _row(each, stack, Path(folder), recording=parsed.record)
            rows.append(row)
            failed = failed or not passed
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    print()
    for row in rows:
        print("  ".join(map(str.ljust, row, widths)).rstrip())
    return int(failed)


def _row(
    each: Installed, stack: ScriptedStack, folder: Path, *, recording: bool
) -> tuple[tuple[str, ...], bool]:
    name = each.program.name
    if each.missing is not None:
        return (name, "", "", "", f"not run: {each.missing}"), True
    print(f"{name} {each.version}", flush=True)
    home = folder / name
    result = run_program(each.program, stack, each.folder, home)
    if result.problems:
        _print_failure(result)
    elif recording:
        record(each, result, home)
    outcome = "; ".join(result.problems) or "passed"
    row = (name, each.version, _statuses(result), f"{result.seconds:.1f}", outcome)
    return row, not result.problems


def _statuses(result: Result) -> str:
    """Return the number of requests per response status as text."""
    statuses = [str(each.response.status) if each.response else "-" for each in result.exchanges]
    return ", ".join(f"{count} x {status}" for status, count in Counter(statuses).items())


def _print_failure(result: Result) -> None:
    print(result.output)
    for exchange in result.exchanges:
        response = exchange.response
        if response is None or response.status >= 400:
            answer = "no answer" if response is None else response.body.decode(errors="replace")
            print(f"{exchange.request.start}: {answer}", flush=True)


if __name__ == "__main__":
    sys.exit(main())

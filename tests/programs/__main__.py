"""Install programs, run each against the real stack, and print a table of the results.

The programs run in a network namespace that has the loopback interface alone. Installed programs
stay in build/programs. The exit code is 1 if a program fails.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from typing import get_args

from tests.programs.engine.script import Form
from tests.programs.installed import install
from tests.programs.programs import PROGRAMS

_UNSHARE = [
    *("unshare", "--user", "--map-current-user", "--keep-caps", "--net"),
    *("--pid", "--fork", "--kill-child", "--mount-proc"),
]


def main() -> int:
    parsed = _arguments()
    installed = [install(PROGRAMS[name], newest=parsed.newest) for name in parsed.names]
    unshare = _UNSHARE
    if subprocess.run([*unshare, "true"], capture_output=True, check=False).returncode:
        print("no network namespace can be made here: the programs may reach the network")
        unshare = []
    command = [*unshare, sys.executable, "-m", "tests.programs.run"]
    command += [json.dumps([each.fields() for each in installed])]
    command += ["--loopback-alone"] if unshare else []
    command += ["--form", parsed.form]
    command += ["--record"] if parsed.record else []
    return subprocess.run(command, check=False).returncode


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.programs", description=__doc__)
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"{', '.join(PROGRAMS)} (default: all)"
    )
    parser.add_argument("--newest", action="store_true", help="in place of the pinned versions")
    parser.add_argument(
        "--record", action="store_true", help="write what the programs send to tests/data/requests"
    )
    parser.add_argument(
        "--form",
        choices=get_args(Form),
        default="hermes",
        help="how the scripted model writes calls (default: %(default)s)",
    )
    parsed = parser.parse_args()
    parsed.names = parsed.names or list(PROGRAMS)
    if unknown := sorted(set(parsed.names) - set(PROGRAMS)):
        parser.error(f"NAME: found {', '.join(unknown)}; allowed: {', '.join(PROGRAMS)}")
    return parsed


if __name__ == "__main__":
    sys.exit(main())

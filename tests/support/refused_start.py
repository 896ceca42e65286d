"""Output of `python -m gateway` for settings that it refuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping

WITHIN_S = 120  # a second is normal

_SCRIPT = """
import json, os, sys
from gateway.__main__ import main

for settings in json.load(sys.stdin):
    os.environ.update(settings)
    print(main(), end="\\0", flush=True)
    for name in settings:
        del os.environ[name]
"""


def refusals(*cases: Mapping[str, object]) -> list[str]:
    """Return the output with each of these settings, on stdout and stderr, before exit code 2.

    One process runs all cases: the imports dominate the cost of a start.
    """
    environments = [
        {f"GATEWAY_{name.upper()}": str(value) for name, value in case.items()} for case in cases
    ]
    ended = subprocess.run(
        [sys.executable, "-c", _SCRIPT],
        input=json.dumps(environments),
        env={name: value for name, value in os.environ.items() if "GATEWAY_" not in name},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=WITHIN_S,
    )
    assert ended.returncode == 0, ended.stdout
    *told, rest = ended.stdout.split("\0")
    assert (len(told), rest) == (len(cases), ""), ended.stdout
    assert all(each.endswith("\n2") for each in told), told
    return [each[:-1] for each in told]

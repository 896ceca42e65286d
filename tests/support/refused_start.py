"""Output of `python -m gateway` for refused settings."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping

WITHIN_S = 300  # one second is normal

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
    """Return stdout and stderr of the gateway for each of these settings, with exit code 2 checked.

    One process runs all cases, since imports are most of the cost of a start.
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

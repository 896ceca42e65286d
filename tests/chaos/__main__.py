"""Kill, freeze, fill, corrupt and change everything under load: is anything wrong?

    python -m tests.chaos [--minutes 10] [--seed N] [--out DIR] [--only ACT ...] [--continuations N]

Two gateways of two workers, two real Tritons and a Redis; 64 clients of four tenants. Each request
must end in time with the right answer of the adapter version in force, or with a clear error. Usage
logs must match what clients saw; limits hold while Redis has its data. DIR gets the printed table,
as chaos.md and chaos.json, and the servers' logs. The exit code is 1 when a promise was broken.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import shutil
import sys
from pathlib import Path

from tests.chaos.acts import ACTS
from tests.chaos.run import run


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=random.randrange(10_000))
    parser.add_argument("--out", type=Path, default=Path("build/chaos"))
    parser.add_argument("--only", choices=ACTS, nargs="+", default=list(ACTS), metavar="ACT")
    parser.add_argument("--continuations", type=int, default=2, help="GATEWAY_CONTINUATIONS")
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    world = options.out.absolute() / "world"
    shutil.rmtree(world, ignore_errors=True)
    world.mkdir(parents=True)
    seconds, settings = 60 * options.minutes, {"continuations": options.continuations}
    found = asyncio.run(run(world, seconds, options.seed, options.only, **settings))
    found.write(options.out)
    print(found.text())
    return 1 if found.broken else 0


if __name__ == "__main__":
    sys.exit(main())

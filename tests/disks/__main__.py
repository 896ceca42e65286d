"""Three real Tritons with disks of their own, and many adapters: is any answer lost or wrong?

    python -m tests.disks [--adapters 50] [--clients 6] [--seed N] [--out DIR]

Each adapter has two versions. Clients request both while agents copy them to the disks. Agents are
killed half-way and started again, Redis is flushed and killed, and adapters are replaced until the
disks are full. The exit code is 1 if a request failed, an answer was wrong, or a disk held more
than its limit.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import shutil
import sys
from pathlib import Path

from tests.disks.run import run


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--adapters", type=int, default=50)
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--seed", type=int, default=random.randrange(10_000))
    parser.add_argument("--out", type=Path, default=Path("build/disks"))
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    folder = options.out.absolute()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    found = asyncio.run(run(folder, options.adapters, options.seed, clients=options.clients))
    print(found.text())
    return 1 if found.broken else 0


if __name__ == "__main__":
    sys.exit(main())

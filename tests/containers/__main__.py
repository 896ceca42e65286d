"""The project's containers on a real Docker engine: ``python -m tests.containers [OPTIONS]``.

OPTIONS are pytest's. The images are built first, in the host's network. The tests run in their own
network, mount and process namespaces: all ports are free, other Docker engines are not touched, and
all processes end with the tests. Without a Docker engine the program says why and exits with 0.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time

from tests.containers.engine import TREE, NoEngine, install

_ALONE = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]


def main() -> int:
    began = time.monotonic()
    try:
        install()
    except NoEngine as why:
        print(f"skipped: no Docker engine can be had here: {why}")
        return 0
    print(f"engine: {time.monotonic() - began:.0f} s", flush=True)
    python = sys.executable
    subprocess.run([*_ALONE, python, "-m", "tests.containers.images"], cwd=TREE, check=True)
    pytest = [python, "-m", "pytest", "tests/containers", *sys.argv[1:]]
    env = os.environ | {"GATEWAY_CONTAINERS": "yes"}
    return subprocess.run([*_ALONE, "--net", *pytest], cwd=TREE, env=env, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())

"""Gateway with another policy for choosing a replica: python -m bench.routing_gateway POLICY"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence
from itertools import count

from gateway.scheduling import balancer, replicas

_turn = count()


def affinity(of: Sequence[balancer.R], key: bytes | None, _costs: object = None) -> balancer.R:
    """Choose a replica by the key and the load only, ignoring caches."""
    return balancer.choose(of, key)


def round_robin(of: Sequence[balancer.R], _key: object, _costs: object = None) -> balancer.R:
    return of[next(_turn) % len(of)]


POLICIES = {"known": balancer.choose, "affinity": affinity, "round robin": round_robin}

if __name__ == "__main__":
    vars(replicas)["choose"] = POLICIES[sys.argv.pop()]
    runpy.run_module("gateway", run_name="__main__")

"""Gateway that chooses replicas by a policy of the routing benchmark (`bench.routing`).

python -m bench.routing_gateway POLICY
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence
from itertools import count

from gateway.scheduling import balancer, replicas

_turn = count()


def affinity(of: Sequence[balancer.R], key: bytes | None, _costs: object = None) -> balancer.R:
    """Choose a replica by the affinity key and the load. Ignore the estimated cache contents.

    Requests with the same adapter, or with the same beginning of the prompt, have equal keys.
    """
    return balancer.choose(of, key)


def round_robin(of: Sequence[balancer.R], _key: object, _costs: object = None) -> balancer.R:
    return of[next(_turn) % len(of)]


POLICIES = {"known": balancer.choose, "affinity": affinity, "round robin": round_robin}

if __name__ == "__main__":
    vars(replicas)["choose"] = POLICIES[sys.argv.pop()]
    runpy.run_module("gateway", run_name="__main__")

"""Measure the gateway from outside: python -m bench [--quick] [--only PART ...] [--write-readme]

The command prints tables, and writes results.json and results.svg into build/bench. bench/README.md
explains the results.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from bench import report
from bench.load import Clients
from bench.machine import ROOT, Others, cores_for, describe
from bench.parts import PARTS
from bench.plot import draw
from bench.servers import Bench, Unmeasured
from ops.local_stack.ports import PortClaims
from ops.local_stack.process import adopt_orphans

SECONDS, QUICK_SECONDS = 3.0, 1.0
_QUIET = 0.1  # CPU cores that other processes may use


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--only", nargs="+", choices=list(PARTS), metavar="PART", help=str(list(PARTS))
    )
    parser.add_argument("--quick", action="store_true", help="shorter windows, rougher figures")
    parser.add_argument("--seconds", type=float, help=f"length of a window; default {SECONDS:g}")
    parser.add_argument("--rounds", type=int, help="windows of each kind for each of `peers`")
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "bench", metavar="DIR")
    parser.add_argument("--write-readme", action="store_true", help="put results into README.md")
    options = parser.parse_args(arguments)
    seconds = options.seconds or (QUICK_SECONDS if options.quick else SECONDS)
    cores = cores_for(1)
    results = report.Results(
        machine=describe(),
        seconds_per_window=seconds,
        pinned=f"Cores: gateway {cores.gateway}, upstream {cores.upstream}, client {cores.client}.",
    )
    adopt_orphans()
    options.output.mkdir(parents=True, exist_ok=True)
    failed = False
    others = Others()
    clients = Clients(cores.client)
    try:
        with tempfile.TemporaryDirectory(prefix="gateway-bench-") as folder, PortClaims() as claims:
            bench = Bench(
                folder=Path(folder),
                claims=claims,
                cores=cores,
                clients=clients,
                seconds=seconds,
                quick=options.quick,
                rounds=options.rounds,
            )
            for name in options.only or PARTS:
                started = time.monotonic()
                try:
                    results.parts[name] = PARTS[name](bench)
                except Unmeasured as error:
                    bench.notes.append(f"{name}: not measured: {error}")
                    failed = True
                bench.log(f"{name}: {time.monotonic() - started:.0f} s")
                results.notes = bench.notes
                # Write the file after each part, so that an interrupted run leaves the results of
                # the parts that it has completed.
                report.write_json(results, options.output / "results.json")
    finally:
        clients.close()
    if (busy := others.cores()) > _QUIET:
        bench.notes.append(
            f"Other processes kept {busy:.2f} cores busy meanwhile: these figures are rough."
        )
        report.write_json(results, options.output / "results.json")
    (options.output / "results.svg").write_text(draw(results.parts))
    print(report.markdown(results), end="")
    if options.write_readme:
        report.write_readme(results)
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())

"""Benchmark of the gateway's own cost, measured from outside and beside others: `python -m bench`.

It is for the gateway's developers and is not installed. Operators measure their deployment, engine
included, with `gateway bench` (`ops.loadtest`).
"""

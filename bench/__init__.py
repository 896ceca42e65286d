"""Benchmark of the gateway's own CPU time, latency and memory: `python -m bench`.

The benchmark loads the gateway from outside, and compares it with other gateways. It is for the
gateway's developers and is not installed. Operators measure their complete deployment with `gateway
bench` (`ops.loadtest`).
"""

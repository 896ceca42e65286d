"""Load tests of a running deployment, for operators (`gateway bench`).

The folder `bench/` has other load tests, for developers. They use simulated engines, to compare
the CPU time and latency that this gateway and other gateways cause.
"""

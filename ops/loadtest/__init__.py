"""Load tests of a running deployment, for operators (`gateway bench`).

The folder `bench/` is for developers. It compares the gateway's own cost with the cost of other
gateways, with simulated engines.
"""

"""Load tests of a running deployment, for operators (`gateway bench`).

The folder `bench/` is for developers: it compares the gateway's own cost with other gateways, with
simulated engines.
"""

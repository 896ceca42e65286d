"""Load tests of a running deployment, for its operators (`gateway bench`).

The developers' `bench/` measures the cost of the gateway itself, against other gateways and on
engines that cost nothing.
"""

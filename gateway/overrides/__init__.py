"""Overrides: weights and drains of replicas that an admin sets at run time.

Overrides are stored on disk and, if configured, in Redis. They apply to all workers of a gateway,
and with Redis to all gateways.
"""

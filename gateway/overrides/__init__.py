"""Overrides: weights and drains of replicas that an admin sets at run time.

They are stored on disk or in Redis, and apply to all workers and gateways.
"""

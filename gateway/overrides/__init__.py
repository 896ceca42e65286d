"""Overrides: weights and drains of replicas that an admin sets at run time.

Overrides are rows of the database, so they apply to all workers of a gateway, and with PostgreSQL
to all gateways.
"""

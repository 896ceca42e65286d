"""Overrides: weights and drains of replicas that admins set at run time, stored for all workers and
gateways.
"""

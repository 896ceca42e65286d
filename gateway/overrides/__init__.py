"""Admins' changes to replicas at run time: stored for all workers and all gateways."""

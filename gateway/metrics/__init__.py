"""Prometheus metrics of this process."""

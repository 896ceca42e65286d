"""Prometheus metrics of one gateway process."""

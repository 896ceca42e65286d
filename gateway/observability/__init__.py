"""Observability of requests: log lines and spans."""

"""Observability of requests: log lines, the audit log and tracing spans."""

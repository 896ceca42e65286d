"""Timeout of tests' clients that do not test timing."""

from __future__ import annotations

PATIENCE_S = 300.0
"""Seconds.

The libraries' own 5 s, to connect or for an answer, are shorter than a process may wait for the CPU
when five run on two cores.
"""

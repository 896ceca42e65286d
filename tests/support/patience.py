"""A timeout for test clients whose timing is not under test."""

from __future__ import annotations

PATIENCE_S = 300.0
"""Timeout in seconds.

The libraries' default of 5 s is shorter than a process may wait for the CPU when five processes
share two cores.
"""

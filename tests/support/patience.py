"""How long a test's client waits where time is not its subject."""

from __future__ import annotations

PATIENCE_S = 300.0
"""The libraries' own 5 s, to connect or for an answer, are shorter than a process may have to wait
for its turn where five run on two cores."""

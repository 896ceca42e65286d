"""Errors of operators' tools that refer to the command line."""

from __future__ import annotations


class OptionError(ValueError):
    """An option is unsupported, alone or by this server; the text begins with its name."""

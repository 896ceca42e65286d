"""What operators' tools refuse in the words of the command line."""

from __future__ import annotations


class OptionError(ValueError):
    """An option cannot be had, alone or with what the server is; the text begins with its name."""

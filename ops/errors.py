"""Errors in the command lines of operators' tools."""

from __future__ import annotations


class OptionError(ValueError):
    """A command line option is wrong, or the server does not support it.

    The message begins with the name of the option.
    """

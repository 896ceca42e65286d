"""Errors that operators' tools report about their command line."""

from __future__ import annotations


class OptionError(ValueError):
    """A command line option is wrong, or the server does not support it.

    The message begins with the option's name.
    """

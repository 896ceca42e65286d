"""Errors that end the local stack."""


class StackError(Exception):
    """The stack cannot start or continue; the text is for the person at the terminal."""


class StopRequested(Exception):
    """The stack was asked to stop."""

"""Errors that end the local stack."""


class StackError(Exception):
    """The stack cannot start or continue. The message is printed for the user."""


class StopRequested(Exception):
    """A signal asked the stack to stop."""

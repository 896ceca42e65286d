"""Errors that end the local stack."""


class StackError(Exception):
    """The stack cannot start or continue. The message is for the user."""


class StopRequested(Exception):
    """A signal has asked the stack to stop."""

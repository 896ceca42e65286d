"""What can end the local stack."""


class StackError(Exception):
    """It cannot start or go on; the text is meant for the person at the terminal."""


class StopRequested(Exception):
    """It was asked to stop."""

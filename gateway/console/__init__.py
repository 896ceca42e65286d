"""Data of the console: the state of one gateway with all its workers, and changes of this state."""

"""The console's data: the state of one gateway with all its workers, and its changes."""

"""What a console shows: the state of one gateway, of all its workers, and its changes."""

"""The path from a parsed request to the deltas of its answer."""

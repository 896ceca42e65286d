"""From a parsed request to the deltas of its answer."""

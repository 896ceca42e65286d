"""State on disk and in Redis as releases wrote it, which this one must read."""

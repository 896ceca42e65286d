"""Running requests of this process, and statistics of its requests in the last hour."""

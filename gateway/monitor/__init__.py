"""Running requests of this process, and statistics of the last hour."""

"""Processing of a parsed request: tokenization, checks, scheduling and generation."""

"""Documentation for users, and tools that generate parts of it from the code and from real runs."""

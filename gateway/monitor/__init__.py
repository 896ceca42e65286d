"""What runs now and what the last hour was like, kept in the process for whoever looks."""

"""Every touch of the server library."""

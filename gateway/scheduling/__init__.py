"""Whose turn it is, and which Triton is next."""

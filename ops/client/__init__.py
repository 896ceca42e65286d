"""Implementation of `gateway client`: sends a request straight to Triton, and prints the answer."""

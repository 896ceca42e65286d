"""Queues for engines, and the choice of the Triton replica that runs each request."""

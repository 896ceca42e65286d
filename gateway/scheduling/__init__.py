"""Scheduling of requests: queues before the engines, and the choice of a Triton replica."""

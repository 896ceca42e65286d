"""Operators' tools: the `gateway` command, deployment, the local stack, load tests."""

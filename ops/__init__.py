"""Tools for operators: the `gateway` command, deployment, the local stack, and load tests."""

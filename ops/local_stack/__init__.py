"""The local stack: a real Redis, a real Triton and the gateway, started by one command."""

"""Several Triton endpoints that serve the same model: which are there, and which one is next."""

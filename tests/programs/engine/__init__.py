"""A scripted engine behind the real core model of a real Triton."""

"""Load on Triton and the gateway: what is asked, when, of whom, and what came of it."""

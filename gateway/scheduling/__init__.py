"""Admission of requests, and the choice of the Triton replica that runs each of them."""

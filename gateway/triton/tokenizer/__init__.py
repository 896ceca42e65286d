"""Comparison of the gateway's tokenizer with Triton's.

See decision 064 in docs/decisions.
"""

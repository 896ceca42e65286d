"""Comparison of the gateway's tokenizer with Triton's."""

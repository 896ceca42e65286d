"""Data types of a request: options from the API, engine requests and usage.

The data types of the answer are in `gateway.deltas`. All packages between the API and Triton import
this package, so it does not depend on HTTP, gRPC or a tokenizer.
"""

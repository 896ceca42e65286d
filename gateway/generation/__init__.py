"""Data types of a request: options from the API, engine requests and token usage.

The data types of a response are in `gateway.deltas`. All packages between the API and Triton import
this package. It must therefore not depend on HTTP, gRPC or a tokenizer.
"""

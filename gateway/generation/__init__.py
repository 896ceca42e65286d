"""Types for a request on its way from the API to the engine: options, engine requests and usage.

The types of the answer are in `gateway.deltas`. Every package between the API and Triton may import
these types, so they do not depend on HTTP, gRPC or a tokenizer.
"""

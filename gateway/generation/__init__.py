"""Types of a request on its way from the API to the engine: validated, tokenized, then counted.

The answer comes back as the deltas of `gateway.deltas`. Every package between the API and Triton
may import these types, so they know nothing of HTTP, gRPC or a tokenizer.
"""

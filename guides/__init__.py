"""Guided decoding. A guide is a JSON schema, regex or grammar that the model's output must match.

`grammar` converts a guide to a grammar for llguidance, in the dialect of the engine's guided
decoding backend. `limits` refuses guides that are too large for an engine. `worker` is a process
that checks and compiles a guide with these two modules before the gateway sends the guide to the
engine. The CPU executor also compiles guides with `grammar`.
"""

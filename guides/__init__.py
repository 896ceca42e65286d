"""Guided decoding: a guide is the JSON schema, regular expression or grammar that an answer must
match.

`grammar` converts a guide to a grammar of llguidance, in the dialect of the engine's guided
decoding backend. `limits` refuses guides that are too large for an engine. `worker` is a process
that checks a guide with both before the gateway sends the guide to the engine. The CPU executor
compiles guides with `grammar`, too.
"""

"""Guides: the schema, expression or grammar that an answer must match.

`grammar` converts a guide to llguidance's grammar, in the dialect of the engine's backend; `limits`
refuses guides that are too large for an engine; `worker` is a process that tries both. The gateway
sends it a guide before the engine gets the guide, and the CPU executor compiles with the same
`grammar`.
"""

"""What a guide is: the schema, expression or grammar that an answer must match.

`grammar` makes a guide llguidance's, in the dialect of the engine's backend; `limits` refuses what
an engine could not take; `worker` is a process that tries both. The gateway asks it before the
engine is given a guide, and the CPU executor compiles with the same `grammar`.
"""

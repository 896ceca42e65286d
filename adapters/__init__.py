"""LoRA adapters: PEFT form in, TensorRT-LLM tensors out, and the names they are served under.

`adapters.peft` reads, `adapters.convert` converts, `adapters.npy` imports and exports the files of
TensorRT-LLM's own converter, `adapters.registry` maps a name to its versions and
`adapters.sizes` says how many fit an engine's caches. Nothing here knows a network.
Only `convert`, `npy` and `peft_files` import numpy: serving what is already converted does without.
"""

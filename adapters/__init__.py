"""LoRA adapters: conversion of PEFT files to TensorRT-LLM tensors, and the registry of adapter
names.

`adapters.peft` reads PEFT folders, `adapters.convert` converts them, `adapters.npy` imports and
exports the files of TensorRT-LLM's own converter, `adapters.registry` maps a name to its versions,
and `adapters.sizes` computes how many adapters fit an engine's caches. No module uses the network.

Only `convert`, `npy` and `peft_files` import numpy; serving already converted adapters needs none.
"""

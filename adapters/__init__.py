"""LoRA adapters: conversion of PEFT files to TensorRT-LLM tensors, and the registry of names.

`adapters.peft` reads PEFT folders, and `adapters.convert` converts their adapters. `adapters.npy`
imports and exports the files of TensorRT-LLM's own converter. `adapters.registry` maps the name of
an adapter to the adapter's versions. `adapters.sizes` computes how many adapters fit in an engine's
caches. No module uses the network. Only `convert`, `npy` and `peft_files` import numpy. Serving
converted adapters does not need numpy.
"""

"""File names that TensorRT-LLM's hf_lora_convert.py uses.

This module is separate from `adapters.npy`: checking whether the files exist does not import numpy.
"""

from __future__ import annotations

WEIGHTS = "model.lora_weights.npy"
CONFIG = "model.lora_config.npy"
OLD_CONFIG = "model.lora_keys.npy"
ALL = (CONFIG, OLD_CONFIG, WEIGHTS)

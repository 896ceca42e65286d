"""What TensorRT-LLM's hf_lora_convert.py calls an adapter's files. `adapters.npy` reads them, with
numpy; whoever only looks for them does without.
"""

from __future__ import annotations

WEIGHTS = "model.lora_weights.npy"
CONFIG = "model.lora_config.npy"
OLD_CONFIG = "model.lora_keys.npy"
ALL = (CONFIG, OLD_CONFIG, WEIGHTS)

"""Names of the files that TensorRT-LLM's hf_lora_convert.py writes.

The names are in a separate module because `adapters.npy` imports numpy. A caller that only checks
whether the files exist does not need numpy.
"""

from __future__ import annotations

WEIGHTS = "model.lora_weights.npy"
CONFIG = "model.lora_config.npy"
OLD_CONFIG = "model.lora_keys.npy"
ALL = (CONFIG, OLD_CONFIG, WEIGHTS)

"""Releases of TensorRT-LLM, and what their engine tools are called.

Sources: the release notes of TensorRT-LLM, and `trtllm-build --help` of the releases.
"""

from __future__ import annotations

import re
from typing import NamedTuple


class ReleaseError(ValueError):
    """The text names no release, or one that is older than the tools that are planned for."""


class ToolsRemoved(ReleaseError):
    """The release has neither `convert_checkpoint.py` nor `trtllm-build` any more."""


class Release(NamedTuple):
    """The first two numbers, which alone decide about flags."""

    major: int
    minor: int

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}"


# LLaMA came to the unified workflow in 0.8, its LoRA flags to trtllm-build in 0.9.
OLDEST = Release(0, 9)
# The development line of 1.3 lost the tools in July 2026; 1.2 is the last release that has them.
REMOVED = Release(1, 3)
NEWEST = Release(1, 2)

MAX_SEQ_LEN = Release(0, 11)  # --max_output_len before
UNEVEN_STAGES = Release(0, 11)  # pipeline stages of unequal size
KV_CACHE_TYPE = Release(0, 13)  # --paged_kv_cache before; accepted, but deprecated, since
GUIDED_DECODING = Release(0, 19)  # in the Triton repository
MODEL_FOLDERS = Release(0, 20)  # examples/models/core/llama; examples/llama before


def parse_release(text: str) -> Release:
    """The release of a version such as ``0.17.0``, ``v0.17`` or ``1.2.0rc3``.

    Raises ToolsRemoved for one without the engine tools, and ReleaseError.
    """
    found = re.match(r"v?(\d{1,4})\.(\d{1,4})(\D|$)", text, re.ASCII)
    if found is None:
        raise ReleaseError(f"--trtllm-version: found {text!r}; allowed: a version such as 0.17.0")
    release = Release(int(found[1]), int(found[2]))
    if release < OLDEST:
        raise ReleaseError(
            f"--trtllm-version: found {text}; allowed: {OLDEST} and later, whose tools are "
            "convert_checkpoint.py and trtllm-build"
        )
    if release >= REMOVED:
        raise ToolsRemoved(
            f"TensorRT-LLM {text} builds no engines: convert_checkpoint.py, trtllm-build and the "
            "Triton repository inflight_batcher_llm were removed in mid-2026, before "
            f"{REMOVED}. Stay with {NEWEST} or older and its Triton container; or serve the "
            "Hugging Face folder without an engine, with Triton's llmapi repository: "
            "gateway import --llmapi."
        )
    return release

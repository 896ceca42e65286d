"""Releases of TensorRT-LLM: the options of their engine tools, and the templates for each.

Sources: the release notes of TensorRT-LLM, `trtllm-build --help` of the releases, and the table of
containers in `docs/introduction/compatibility.md` of Triton's server.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from triton_repo.releases import V0_17, V0_19, V0_20


class ReleaseError(ValueError):
    """The given release is unknown, or this project does not support its engine tools."""


class ToolsRemoved(ReleaseError):
    """The release no longer has `convert_checkpoint.py` and `trtllm-build`."""


class Release(NamedTuple):
    """The first two numbers of a TensorRT-LLM version, which determine the tools' options."""

    major: int
    minor: int

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}"


# Oldest supported release. Since 0.8, LLaMA engines are built with convert_checkpoint.py and
# trtllm-build. Since 0.9, trtllm-build has options for LoRA.
OLDEST = Release(0, 9)
# The development branch of 1.3 removed the tools in July 2026, so 1.2 is the last release with
# them.
REMOVED = Release(1, 3)
NEWEST = Release(1, 2)

OLDEST_TEMPLATES = Release(0, 17)  # oldest release with templates in this project
MAX_SEQ_LEN = Release(0, 11)  # first release with --max_seq_len, earlier --max_output_len
UNEVEN_STAGES = Release(0, 11)  # first release with pipeline stages of unequal size
KV_CACHE_TYPE = Release(0, 13)  # first release with --kv_cache_type, earlier --paged_kv_cache
GUIDED_DECODING = Release(0, 19)  # first release with guided decoding in the Triton repository
MODEL_FOLDERS = Release(0, 20)  # examples/models/core/llama exists since; before, examples/llama


# TensorRT-LLM release in the containers `tritonserver:YY.MM-trtllm-python-py3`. A key (YY, MM) is
# the first container with the release.
_CONTAINERS = {
    (24, 12): Release(0, 16),
    (25, 1): Release(0, 17),
    (25, 3): Release(0, 18),
    (25, 5): Release(0, 19),
    (25, 6): Release(0, 20),
    (25, 8): Release(0, 21),
    (25, 9): Release(1, 0),
    (25, 12): Release(1, 1),
    (26, 3): Release(1, 2),
}
_FIRST_CONTAINER, _LAST_CONTAINER = (24, 12), (26, 7)
_CONTAINER_OF_NEW_NAMES = (25, 5)
_RELEASE_OF_TWO_SETS = Release(0, 19)


def parse_release(text: str, option: str = "--trtllm-version") -> Release:
    """Return the release of a TensorRT-LLM version, or of the tag of a Triton container.

    Args:
        text: a version, such as ``v0.17`` or ``1.2.0rc3``; or a container's tag, such as ``25.08``
            or ``25.08-trtllm-python-py3``, with or without the image's name.
        option: name of the option or field, for error messages.

    Raises:
        ToolsRemoved: the release has no engine tools.
        ReleaseError: the text names no release, or an unknown one.
    """
    numbers = _numbers(text, option)
    if not _is_container(numbers):
        release = Release(*numbers)
    elif _FIRST_CONTAINER <= numbers <= _LAST_CONTAINER:
        release = _CONTAINERS[max(first for first in _CONTAINERS if first <= numbers)]
    else:
        raise ReleaseError(
            f"{option}: found {text}; containers known here: {_tag(_FIRST_CONTAINER)} to "
            f"{_tag(_LAST_CONTAINER)}. Give the version of its TensorRT-LLM instead, such as 1.2.1"
        )
    if release < OLDEST:
        raise ReleaseError(
            f"{option}: found {text}; allowed: {OLDEST} and later, whose tools are "
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


def read_sets(text: str, option: str = "--trtllm-version") -> tuple[str, ...]:
    """Return the names of the template sets that fit a release or a container, most likely first.

    A template set has the model repository's templates for a range of releases. Only version 0.19
    has two sets, because the backend in container 25.05 reads other input names than the backend of
    the git tag v0.19.0. Raises ToolsRemoved and ReleaseError like `parse_release`.
    """
    release, numbers = parse_release(text, option), _numbers(text, option)
    if _is_container(numbers):
        return (V0_20,) if numbers >= _CONTAINER_OF_NEW_NAMES else (V0_17,)
    if release == _RELEASE_OF_TWO_SETS:
        return (V0_19, V0_20)
    return (V0_20,) if release > _RELEASE_OF_TWO_SETS else (V0_17,)


def _numbers(text: str, option: str) -> tuple[int, int]:
    tag = text.rpartition(":")[2]
    found = re.match(r"v?(\d{1,4})\.(\d{1,4})(\D|$)", tag, re.ASCII)
    if found is None:
        raise ReleaseError(
            f"{option}: found {text!r}; allowed: a version such as 0.17.0, or a container's tag "
            "such as 25.08"
        )
    return int(found[1]), int(found[2])


def _is_container(numbers: tuple[int, int]) -> bool:
    return numbers >= (23, 0)


def _tag(numbers: tuple[int, int]) -> str:
    return f"{numbers[0]}.{numbers[1]:02}"

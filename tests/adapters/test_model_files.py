"""Truncated model weights, and model folders with missing files."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from adapters.model_files import FileProblem, is_incomplete, weight_problems


def _save(path: Path) -> tuple[int, int]:
    """Write weights. Return the sizes of the header and of the file in bytes."""
    save_file({"a": np.ones(8, np.float32), "b": np.ones(4, np.float32)}, path)
    header = 8 + int.from_bytes(path.read_bytes()[:8], "little")
    return header, path.stat().st_size


def test_a_whole_file_is_no_problem(tmp_path: Path) -> None:
    _save(tmp_path / "model.safetensors")
    assert weight_problems(tmp_path) == []
    assert not is_incomplete(tmp_path)


@pytest.mark.parametrize("part", ["data", "header"])
def test_a_file_that_was_cut_is_named_with_its_sizes(tmp_path: Path, part: str) -> None:
    path = tmp_path / "model.safetensors"
    header, whole = _save(path)
    size, expected = (whole - 1, whole) if part == "data" else (header - 1, header)
    os.truncate(path, size)
    found = f"{path} was cut: it has {size} of {expected} bytes by its header"
    assert weight_problems(tmp_path) == [FileProblem(found, "download it again")]
    assert is_incomplete(tmp_path)


def test_each_file_that_was_cut_is_named(tmp_path: Path) -> None:
    for name in ("model-1", "model-2", "model-3"):
        _save(tmp_path / f"{name}.safetensors")
    for name in ("model-1", "model-3"):
        os.truncate(tmp_path / f"{name}.safetensors", 100)
    named = [problem.found.partition(" was cut")[0] for problem in weight_problems(tmp_path)]
    assert named == [f"{tmp_path}/{name}.safetensors" for name in ("model-1", "model-3")]


@pytest.mark.parametrize("length", [100_000_001, 2**64 - 1])
def test_the_length_of_a_header_is_bounded(tmp_path: Path, length: int) -> None:
    """Check that an absurd header length is not reported as a truncated file.

    The loader reports later that the file is no safetensors file.
    """
    (tmp_path / "model.safetensors").write_bytes(length.to_bytes(8, "little") + b"{}")
    assert weight_problems(tmp_path) == []


def test_pickled_weights_beside_a_cut_file_are_for_other_tools(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    _save(path)
    os.truncate(path, 100)
    (tmp_path / "pytorch_model.bin").touch()
    assert not is_incomplete(tmp_path)


def test_a_gguf_file_alone_is_no_model(tmp_path: Path) -> None:
    assert not is_incomplete(tmp_path)
    (tmp_path / "m.gguf").write_bytes(b"GGUF\x03\0\0\0")
    assert is_incomplete(tmp_path)

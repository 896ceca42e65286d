"""File types recognized by their first bytes, and the error messages for wrong files."""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
import zipfile
from pathlib import Path

import pytest

from adapters import chat_template, errors, file_kinds, npy, npy_files, peft
from adapters.base_model import read_base_model
from adapters.config_json import ConfigError
from adapters.engine_config import read_engine_config
from adapters.file_kinds import GGUF, LFS_POINTER, PICKLE, FileKind
from adapters.model_files import INDEX, is_incomplete, tokenizer_problems, weight_problems
from tests.support.lora_files import BASE, qv_tensors, write_peft

POINTER = (
    b"version https://git-lfs.github.com/spec/v1\n"
    b"oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 132\n"
)
GGUF_HEAD = b"GGUF\x03\x00\x00\x00" + bytes(56)


def _zip() -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps({}))
    return made.getvalue()


FOREIGN = {
    "LFS": (POINTER, LFS_POINTER),
    "zip": (_zip(), PICKLE),
    "pickle": (pickle.dumps({"a": [1.0] * 9}, protocol=2), PICKLE),
    "GGUF": (GGUF_HEAD, GGUF),
    "page": (b"<!DOCTYPE html>\n<html>Log in" + bytes(40), file_kinds.WEB_PAGE),
}
foreign = pytest.mark.parametrize(("content", "kind"), FOREIGN.values(), ids=list(FOREIGN))


@pytest.mark.parametrize("length", [0x0280, 0x0480, 0x4B50])
def test_a_header_length_that_looks_like_a_pickle_is_none(length: int) -> None:
    """Check that a header length with the first bytes of a pickle is still safetensors."""
    head = length.to_bytes(8, "little") + b'{"__metadata__":{}'
    assert file_kinds.kind_of(head) is None


def test_other_files_are_of_no_kind(tmp_path: Path) -> None:
    folder = write_peft(tmp_path, qv_tensors())
    for path in folder.iterdir():
        assert file_kinds.kind_of_file(path) is None
    assert file_kinds.kind_of(b"") is None
    assert file_kinds.kind_of_file(tmp_path / "nothing") is None


def test_a_pipe_is_not_opened(tmp_path: Path) -> None:
    """Check that a named pipe is not opened: that would block, or take data from its reader."""
    os.mkfifo(tmp_path / "m.gguf")
    both_ends = os.open(tmp_path / "m.gguf", os.O_RDWR)
    try:
        os.write(both_ends, GGUF_HEAD)
        assert file_kinds.kind_of_file(tmp_path / "m.gguf") is None
    finally:
        os.close(both_ends)


@foreign
def test_weights_of_another_kind(tmp_path: Path, content: bytes, kind: FileKind) -> None:
    folder = write_peft(tmp_path, qv_tensors())
    (folder / peft.WEIGHTS).write_bytes(content)
    with pytest.raises(errors.CorruptFile) as raised:
        peft.read(folder)
    assert str(raised.value) == (
        f"adapter_model.safetensors: is {kind.name}, and no safetensors file; {kind.fix}"
    )


@pytest.mark.parametrize("name", [peft.CONFIG, "tokenizer_config.json", chat_template.FILE])
def test_a_pointer_in_place_of_an_adapters_text(tmp_path: Path, name: str) -> None:
    folder = write_peft(tmp_path, qv_tensors())
    (folder / name).write_bytes(POINTER)
    read = peft.read if name == peft.CONFIG else chat_template.read
    with pytest.raises(errors.CorruptFile, match=f"^{name}: is a Git LFS pointer.*git lfs pull"):
        read(folder)


def test_a_pointer_in_place_of_npy_weights(tmp_path: Path) -> None:
    (tmp_path / npy_files.CONFIG).write_bytes(POINTER)
    (tmp_path / npy_files.WEIGHTS).write_bytes(POINTER)
    with pytest.raises(errors.CorruptFile, match=r"model\.lora_config\.npy: is a Git LFS pointer"):
        npy.read(tmp_path, BASE)


@pytest.mark.parametrize(
    ("files", "kind", "message"),
    [
        ({}, errors.MissingFile, "adapter_model.safetensors: the adapter has no such file"),
        (
            {"adapter_model.bin": _zip()},
            errors.PickleRefused,
            "adapter_model.bin: is a pickle, which runs code when it is read; save it",
        ),
        (
            {"adapter_model.bin": POINTER},
            errors.PickleRefused,
            "adapter_model.bin: is a Git LFS pointer",
        ),
        ({"adapter-f16.GGUF": GGUF_HEAD}, errors.MissingFile, "adapter-f16.GGUF: is a GGUF file"),
        (
            {"adapter_model.safetensors.index.json": b"{}"},
            errors.MissingFile,
            "adapter_model.safetensors.index.json: the weights are in several files; save",
        ),
    ],
)
def test_an_adapter_without_weights(
    tmp_path: Path, files: dict[str, bytes], kind: type[errors.AdapterError], message: str
) -> None:
    folder = write_peft(tmp_path / "adapter-x8f3k", qv_tensors())
    (folder / peft.WEIGHTS).unlink()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    with pytest.raises(kind) as raised:
        peft.read(folder)
    assert str(raised.value).startswith(message)
    # The message leaves out the folder's name, often a temporary one of this process.
    assert folder.name not in str(raised.value)


def test_an_empty_and_a_cut_file(tmp_path: Path) -> None:
    folder = write_peft(tmp_path, qv_tensors())
    raw = (folder / peft.WEIGHTS).read_bytes()
    for content, said in ((b"", "is empty; save"), (raw[:40], "or was cut: it has 40 bytes")):
        (folder / peft.WEIGHTS).write_bytes(content)
        with pytest.raises(errors.CorruptFile, match=said):
            peft.read(folder)


def _sharded(folder: Path, count: int) -> list[str]:
    names = [f"model-{n:05}-of-{count:05}.safetensors" for n in range(1, count + 1)]
    index = {"weight_map": {f"t{n}": name for n, name in enumerate(names)}}
    (folder / INDEX).write_text(json.dumps(index))
    for name in names:
        (folder / name).write_bytes(bytes(8) + b"{}")
    return names


def test_missing_shards_are_named(tmp_path: Path) -> None:
    names = _sharded(tmp_path, 6)
    assert weight_problems(tmp_path) == []
    (tmp_path / names[1]).unlink()
    [problem] = weight_problems(tmp_path)
    assert str(problem) == (
        f"{tmp_path / names[1]} is missing: {INDEX} names 6 files of weights, and 1 of them are "
        f"not there ({names[1]}); download them again"
    )
    assert is_incomplete(tmp_path)
    for name in names[2:]:
        (tmp_path / name).unlink()
    assert "5 of them are not there" in str(weight_problems(tmp_path)[0])
    assert "and 2 more)" in str(weight_problems(tmp_path)[0])
    # Only the text files have been downloaded so far.
    (tmp_path / names[0]).unlink()
    assert not is_incomplete(tmp_path)


@pytest.mark.parametrize(
    "index", ["[]", "{", '{"weight_map": 3}', '{"weight_map": {"a": "../b"}}', "[" * 100_000]
)
def test_an_index_that_cannot_be_read(tmp_path: Path, index: str) -> None:
    (tmp_path / INDEX).write_text(index)
    [problem] = weight_problems(tmp_path)
    assert str(problem).startswith(f"{tmp_path / INDEX} ")
    assert str(problem).endswith("; download it again")


@foreign
def test_a_models_files_of_another_kind(tmp_path: Path, content: bytes, kind: FileKind) -> None:
    for name in ("model.safetensors", "tokenizer.json"):
        (tmp_path / name).write_bytes(content)
    for name, problems in (
        ("model.safetensors", weight_problems(tmp_path)),
        ("tokenizer.json", tokenizer_problems(tmp_path)),
    ):
        [problem] = problems
        assert str(problem) == f"{tmp_path / name} is {kind.name}; {kind.fix}"
    _sharded(tmp_path, 2)
    (tmp_path / "model-00002-of-00002.safetensors").write_bytes(content)
    assert any("00002-of-00002" in problem.found for problem in weight_problems(tmp_path))


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("m.Q4_K_M.gguf", GGUF_HEAD, "m.Q4_K_M.gguf is a GGUF file of llama.cpp"),
        ("pytorch_model.bin", _zip(), "pytorch_model.bin is a pickle"),
        ("pytorch_model.bin", POINTER, "pytorch_model.bin is a Git LFS pointer"),
        ("README.md", b"#", "has no model*.safetensors; download"),
    ],
)
def test_a_model_without_safetensors(tmp_path: Path, name: str, content: bytes, said: str) -> None:
    (tmp_path / name).write_bytes(content)
    [problem] = weight_problems(tmp_path)
    assert said in str(problem)


CHECKPOINT = {
    "producer": {"name": "modelopt"},
    "architecture": "LlamaForCausalLM",
    "dtype": "float16",
    "num_hidden_layers": 2,
    "mapping": {"world_size": 1},
}


def test_a_checkpoint_in_place_of_an_engine(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CHECKPOINT))
    (tmp_path / "rank0.safetensors").write_bytes(b"")
    said = (
        f"{tmp_path / 'config.json'}: is that of a TensorRT-LLM checkpoint, which is what an "
        f"engine is built from; run trtllm-build --checkpoint_dir {tmp_path} and name what it "
        "writes"
    )
    with pytest.raises(ConfigError) as raised:
        read_engine_config(tmp_path)
    assert str(raised.value) == said
    with pytest.raises(errors.UnsupportedEngine) as refused:
        read_base_model(tmp_path, ("demo",))
    assert str(refused.value) == said


def test_a_folder_that_is_not_there_or_no_folder(tmp_path: Path) -> None:
    shutil.copyfile(__file__, tmp_path / "file")
    (tmp_path / "m.gguf").write_bytes(GGUF_HEAD)
    (tmp_path / "pointer").mkdir()
    (tmp_path / "pointer" / "config.json").write_bytes(POINTER)
    for name, said in {
        "nowhere": f"there is no folder {tmp_path}/nowhere",
        "file": f"{tmp_path}/file is a file, and not a folder",
        "m.gguf": f"{tmp_path}/m.gguf is a GGUF file of llama.cpp",
        "": "is not there, and m.gguf is a GGUF file of llama.cpp",
        "pointer": "is a Git LFS pointer",
    }.items():
        with pytest.raises(ConfigError) as raised:
            read_engine_config(tmp_path / name)
        assert str(raised.value).startswith(f"{tmp_path / name / 'config.json'}: {said}")

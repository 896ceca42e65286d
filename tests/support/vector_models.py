"""Embedding and reranking models beside the core model of a running Triton."""

from __future__ import annotations

import importlib.util
import json
import shutil
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_MODELS = Path(__file__).parent / "models"
WIDTH = 256
BATCH = 8
"""Maximum number of texts in one request to `words` and `ranker`."""

_TEXT = ("TYPE_STRING", [1])
_ROW = ("TYPE_FP32", [WIDTH])
# Model name -> file, `takes`, maximum batch size, inputs, outputs.
_CONFIGS: dict[str, tuple[str, str, int, dict[str, Any], dict[str, Any]]] = {
    "words": ("words", "text", BATCH, {"TEXT": _TEXT}, {"EMBEDDING": _ROW}),
    "words_ids": (
        *("words", "ids", 64),
        {"input_ids": ("TYPE_INT64", [-1]), "attention_mask": ("TYPE_INT64", [-1])},
        {"EMBEDDING": _ROW},
    ),
    "ranker": (
        *("words", "pair", BATCH),
        {"QUERY": _TEXT, "DOCUMENT": _TEXT},
        {"SCORE": ("TYPE_FP32", [1])},
    ),
    "odd": ("odd", "text", 64, {"TEXT": _TEXT}, {"OUT": ("TYPE_FP32", [-1])}),
}


def tokenizer_folder(folder: Path) -> Path:
    """Write the tokenizer of `words` into a model's folder."""
    spec = importlib.util.find_spec("wordllama")
    assert spec is not None
    assert spec.origin is not None
    file = Path(spec.origin).parent / "tokenizers" / "l2_supercat_tokenizer_config.json"
    folder.mkdir(exist_ok=True)
    shutil.copyfile(file, folder / "tokenizer.json")
    return folder


def sections(tokenizer: Path) -> dict[str, Any]:
    """Return sections of the configuration file with all models, under the clients' names."""
    ids = {"input_ids": "input_ids", "attention_mask": "attention_mask", "output": "EMBEDDING"}
    text = {"input": "TEXT", "output": "EMBEDDING"}
    counted = {"tokenizer": str(tokenizer), "max_tokens": 512}
    return {
        "embedding_models": {
            "words": text | counted | {"dimensions": True},
            "uncounted": text | {"triton_model": "words"},
            "ids": ids | counted | {"triton_model": "words_ids"},
            "odd": {"input": "TEXT", "output": "OUT"},
            "absent": text,
        },
        "rerank_models": {
            "ranker": {"query": "QUERY", "document": "DOCUMENT", "output": "SCORE"} | counted,
        },
    }


def write_models(repository: Path, names: Sequence[str] = tuple(_CONFIGS)) -> None:
    """Write the models into a model repository."""
    for name in names:
        file, takes, batch, inputs, outputs = _CONFIGS[name]
        folder = repository / name
        (folder / "1").mkdir(parents=True, exist_ok=True)
        shutil.copyfile(_MODELS / f"{file}.py", folder / "1" / "model.py")
        config = {
            "name": name,
            "backend": "python",
            "max_batch_size": batch,
            "input": _tensors(inputs),
            "output": _tensors(outputs),
            "parameters": {"takes": takes},
            "instance_group": [{"kind": "KIND_CPU", "count": 1}],
        }
        (folder / "config.pbtxt").write_text(_pbtxt(config), encoding="utf-8")


def load_models(address: str, names: Sequence[str] = tuple(_CONFIGS)) -> None:
    """Load models into a Triton at this URL, started with --model-control-mode=explicit."""
    for name in names:
        url = f"{address}/v2/repository/models/{name}/load"
        with urllib.request.urlopen(url, data=b"{}", timeout=120) as answer:
            answer.read()


def _tensors(tensors: dict[str, tuple[str, list[int]]]) -> list[dict[str, Any]]:
    return [{"name": n, "data_type": kind, "dims": dims} for n, (kind, dims) in tensors.items()]


def _pbtxt(config: dict[str, Any]) -> str:
    lines = []
    for name, value in config.items():
        if name == "parameters":
            lines += [
                f"{name} {{ key: {json.dumps(key)} value: {{ string_value: {json.dumps(text)} }} }}"
                for key, text in value.items()
            ]
        elif isinstance(value, list):
            lines += [f"{name} {{ {_fields(each)} }}" for each in value]
        else:
            lines.append(f"{name}: {json.dumps(value)}")
    return "\n".join(lines) + "\n"


def _fields(message: dict[str, Any]) -> str:
    return " ".join(
        f"{name}: {value if name in ('data_type', 'kind') else json.dumps(value)}"
        for name, value in message.items()
    )

"""The llmapi repository's renderer, checked with Triton's protobuf and a YAML parser."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from triton_repo.llmapi_repository import render_llmapi
from triton_repo.parameters import Value
from triton_repo.render import RenderError


def rendered(folder: Path, **parameters: Value) -> tuple[Any, dict[str, Any]]:
    """Return the parsed config.pbtxt and model.yaml."""
    render_llmapi(folder, {"model": "/models/llama", **parameters})
    model = folder / "tensorrt_llm"
    config = text_format.Parse((model / "config.pbtxt").read_text(), model_config_pb2.ModelConfig())
    return config, yaml.safe_load((model / "1" / "model.yaml").read_text())


def test_what_is_not_given_is_left_to_the_llm(tmp_path: Path) -> None:
    config, arguments = rendered(tmp_path)
    assert config.parameters["tokenizer_dir"].string_value == "/models/llama"
    assert (config.name, config.backend, config.max_batch_size) == ("tensorrt_llm", "python", 0)
    assert config.model_transaction_policy.decoupled
    own = arguments.pop("triton_config")
    assert own == {
        "max_batch_size": 0,
        "decoupled": True,
        "cancellation_check_period_ms": 100,
        "behaves_as": "main",
        "polls_ended_requests": False,
    }
    assert arguments.pop("kv_cache_config") == {
        "enable_block_reuse": True,
        "free_gpu_memory_fraction": 0.9,
        "max_tokens": None,
    }
    assert {name: value for name, value in arguments.items() if value is not None} == {
        "model": "/models/llama",
        "backend": "pytorch",
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "max_num_tokens": 8192,
    }


def test_both_files_say_whether_ended_requests_are_polled(tmp_path: Path) -> None:
    for polls, said in ((False, "false"), (True, "true")):
        config, arguments = rendered(tmp_path, polls_ended_requests=polls)
        assert config.parameters["polls_ended_requests"].string_value == said
        assert arguments["triton_config"]["polls_ended_requests"] is polls


def test_both_files_say_whether_it_is_decoupled(tmp_path: Path) -> None:
    config, arguments = rendered(tmp_path, decoupled=False)
    assert config.model_transaction_policy.decoupled is False
    assert arguments["triton_config"]["decoupled"] is False


@pytest.mark.parametrize("path", ['a "quoted" one', r"with \ in it", "null", "# no comment: 1"])
def test_paths_stay_what_they_are(tmp_path: Path, path: str) -> None:
    config, arguments = rendered(tmp_path, model=path, tokenizer=path)
    assert (arguments["model"], arguments["tokenizer"]) == (path, path)
    assert config.parameters["tokenizer_dir"].string_value == path


def test_adapters_are_allowed_by_any_of_their_parameters(tmp_path: Path) -> None:
    _, arguments = rendered(tmp_path, lora_target_modules="attn_q,attn_v", max_lora_rank="8")
    assert arguments["lora_config"] == {
        "lora_target_modules": ["attn_q", "attn_v"],
        "max_lora_rank": 8,
    }
    _, arguments = rendered(tmp_path, max_cpu_loras=3)
    assert arguments["lora_config"] == {"max_cpu_loras": 3}


def test_all_problems_are_named_and_nothing_is_written(tmp_path: Path) -> None:
    wrong: dict[str, Value] = {"behaves_as": "1.4", "engine_dir": "x", "lora_target_modules": "a,"}
    with pytest.raises(RenderError) as caught:
        render_llmapi(tmp_path / "repository", wrong)
    for name in (*wrong, "model"):
        assert f"{name}: " in str(caught.value)
    assert not (tmp_path / "repository").exists()

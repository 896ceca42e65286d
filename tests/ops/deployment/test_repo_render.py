"""`gateway repo render`: a description and an engine become a repository that Triton serves."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from adapters.engine_config import EngineConfig, read_engine_config
from ops.commands import repo
from ops.deployment.check import check
from ops.deployment.fields import FIELDS
from ops.deployment.repository import (
    DeploymentDescription,
    DescriptionError,
    from_fields,
    from_yaml,
    template_parameters,
    write,
)
from tests.support.commands import Answer, gateway
from tests.support.triton_server import MODEL, serving
from triton_repo.cpu_executor import engine
from triton_repo.parameters import PARAMETERS

ENGINE = EngineConfig(
    architecture="LlamaForCausalLM",
    dtype="bfloat16",
    logits_dtype="float16",
    num_hidden_layers=32,
    hidden_size=4096,
    num_attention_heads=32,
    num_key_value_heads=8,
    intermediate_size=14336,
    max_batch_size=64,
    max_input_len=4096,
    max_seq_len=8192,
    max_beam_width=1,
    paged_kv_cache=True,
    use_paged_context_fmha=True,
    lora_plugin="auto",
    lora_target_modules=("attn_q", "attn_k", "attn_v"),
    max_lora_rank=16,
)


def described(**fields: Any) -> DeploymentDescription:
    return from_fields({"engine_dir": "/models/engine", "tokenizer_dir": "/models/hf", **fields})


def refusals(engine_config: EngineConfig = ENGINE, **fields: Any) -> list[str]:
    with pytest.raises(DescriptionError) as raised:
        template_parameters(described(**fields), engine_config)
    return str(raised.value).splitlines()


def read_configs(folder: Path) -> dict[str, Any]:
    return {
        path.parent.name: text_format.Parse(path.read_text(), model_config_pb2.ModelConfig())
        for path in folder.glob("*/config.pbtxt")
    }


def render(*arguments: str | Path) -> Answer:
    return gateway("repo", "render", *arguments)


@pytest.mark.slow
def test_a_rendered_repository_is_served(tmp_path: Path) -> None:
    built = engine.build(
        MODEL,
        tmp_path / "engine",
        max_batch_size=8,
        lora_target_modules=engine.LLAMA_LORA_MODULES,
    )
    (tmp_path / "deployment.yaml").write_text(
        f"engine_dir: engine\ntokenizer_dir: {MODEL}\ntriton_backend: python\n"
        "max_queue_size: 32\nbls_instance_count: 1\npreprocessing_instance_count: 1\n"
        "parameters:\n  exclude_input_in_output: true\n"
    )
    answer = render(
        *("--description", tmp_path / "deployment.yaml", "--output", tmp_path / "repository"),
        *("--bls-instance-count", "2", "--template-values", "preprocessing_instance_count:2"),
    )
    assert answer.stderr == ""
    assert answer.returncode == 0
    assert answer.stdout.splitlines() == [
        f"wrote {tmp_path / 'repository'}",
        "errors: 0, warnings: 0, notes: 0",
    ]
    core = read_configs(tmp_path / "repository")["tensorrt_llm"]
    assert core.parameters["gpt_model_path"].string_value == str(built)
    assert core.max_batch_size == 8
    with serving(tmp_path) as server:
        status, body = server.generate(
            "ensemble",
            text_input="The capital of France is",
            max_tokens=4,
        )
    assert status == 200
    assert "Paris" in body["text_output"]


def test_the_engine_decides_what_the_description_does_not() -> None:
    values = template_parameters(described(), ENGINE)
    assert values["triton_max_batch_size"] == 64
    assert values["logits_datatype"] == "TYPE_FP16"
    assert values["lora_weights_data_type"] == "TYPE_BF16"
    assert values["enable_kv_cache_reuse"] is True
    assert values["batching_strategy"] == "inflight_fused_batching"
    assert values["decoupled_mode"] is True
    assert "max_beam_width" not in values
    unpaged = dataclasses.replace(ENGINE, use_paged_context_fmha=False, logits_dtype=None)
    values = template_parameters(described(), unpaged)
    assert values["enable_kv_cache_reuse"] is False
    assert values["logits_datatype"] == "TYPE_FP32"
    assert (
        template_parameters(described(batching_strategy="V1"), ENGINE)["enable_kv_cache_reuse"]
        is False
    )


def test_the_type_of_lora_weights_is_the_same_in_all_three_models(tmp_path: Path) -> None:
    write(described(), tmp_path / "repository", ENGINE)
    types = {
        name: {tensor.name: tensor.data_type for tensor in config.input}.get("lora_weights")
        for name, config in read_configs(tmp_path / "repository").items()
    }
    bfloat16 = model_config_pb2.TYPE_BF16
    assert types == {
        "preprocessing": None,
        "tensorrt_llm": bfloat16,
        "postprocessing": None,
        "ensemble": bfloat16,
        "tensorrt_llm_bls": bfloat16,
    }


NO_LORA = dataclasses.replace(ENGINE, lora_plugin=None)
UNPAGED = dataclasses.replace(ENGINE, paged_kv_cache=False)
WITHOUT_FMHA = dataclasses.replace(ENGINE, use_paged_context_fmha=False)


@pytest.mark.parametrize(
    ("engine_config", "fields", "named"),
    [
        (ENGINE, {"max_beam_width": 4}, ["max_beam_width: found 4"]),
        (ENGINE, {"triton_max_batch_size": 65}, ["triton_max_batch_size: found 65"]),
        (WITHOUT_FMHA, {"enable_kv_cache_reuse": True}, ["enable_kv_cache_reuse: found true"]),
        (WITHOUT_FMHA, {"enable_chunked_context": True}, ["enable_chunked_context: found true"]),
        (UNPAGED, {"max_tokens_in_paged_kv_cache": 9}, ["max_tokens_in_paged_kv_cache: found 9"]),
        (NO_LORA, {"lora_cache_max_adapter_size": 8}, ["lora_cache_max_adapter_size: found 8"]),
        (ENGINE, {"lora_cache_host_memory_bytes": 9}, ["lora_cache_host_memory_bytes: found 9"]),
        (ENGINE, {"guided_decoding_backend": "xgrammar"}, ["guided_decoding_backend: found xgra"]),
        (
            ENGINE,
            {"batching_strategy": "V1", "enable_chunked_context": True},
            ["enable_chunked_context: found true with batching_strategy V1"],
        ),
        (
            ENGINE,
            {"parameters": {"logits_datatype": "TYPE_FP32"}},
            ["logits_datatype: declared TYPE_FP32"],
        ),
        (
            ENGINE,
            {"parameters": {"lora_weights_data_type": "TYPE_FP16"}},
            ["lora_weights_data_type: declared TYPE_FP16"],
        ),
        (
            ENGINE,
            {"max_beam_width": 4, "parameters": {"decoding_mode": "greedy", "beams": 1}},
            [
                "max_beam_width: found 4",
                "beams: unknown parameter",
                "decoding_mode: found 'greedy'",
            ],
        ),
        (
            ENGINE,
            {"kv_cache_host_memory_bytes": 9, "enable_kv_cache_reuse": False},
            ["kv_cache_host_memory_bytes: host memory"],
        ),
        (dataclasses.replace(ENGINE, max_batch_size=None), {}, ["triton_max_batch_size: "]),
    ],
)
def test_what_the_engine_contradicts_is_refused(
    tmp_path: Path, engine_config: EngineConfig, fields: dict[str, Any], named: list[str]
) -> None:
    lines = refusals(engine_config, **fields)
    assert [line[: len(start)] for line, start in zip(lines, named, strict=True)] == named
    with pytest.raises(DescriptionError):
        write(described(**fields), tmp_path / "new", engine_config)
    assert not (tmp_path / "new").exists()


def test_what_the_engine_allows_is_not_refused() -> None:
    template_parameters(
        described(
            triton_max_batch_size=64,
            max_beam_width=1,
            enable_chunked_context=True,
            batch_scheduler_policy="max_utilization",
            guided_decoding_backend="xgrammar",
            xgrammar_tokenizer_info_path="/models/info.json",
            lora_cache_max_adapter_size=16,
            kv_cache_host_memory_bytes=10**9,
        ),
        ENGINE,
    )


def test_what_the_engine_does_not_say_is_not_judged() -> None:
    silent = EngineConfig(max_batch_size=8, lora_plugin="float16")
    values = template_parameters(
        described(
            max_beam_width=4,
            enable_chunked_context=True,
            parameters={"logits_datatype": "TYPE_FP16"},
        ),
        silent,
    )
    assert values["lora_weights_data_type"] == "TYPE_FP16"
    assert values["enable_kv_cache_reuse"] is False


def test_problems_name_file_and_line(tmp_path: Path) -> None:
    built = engine.build(MODEL, tmp_path / "engine")
    path = tmp_path / "deployment.yaml"
    path.write_text(
        f"engine_dir: {built}\n"
        f"tokenizer_dir: {MODEL}\n"
        "triton_backend: python\n"
        "max_beam_width: 2\n"
        "parameters:\n"
        "  decoding_mode: greedy\n"
    )
    answer = render("--description", path, "--output", tmp_path / "new")
    assert answer.returncode == 1
    assert not (tmp_path / "new").exists()
    first, second = answer.stderr.splitlines()
    assert first.startswith(f"gateway repo render: {path}:4: max_beam_width: found 2, but ")
    assert "Fix: set max_beam_width:1, or build the engine with --max_beam_width 2." in first
    assert second.startswith(f"gateway repo render: {path}:6: decoding_mode: found 'greedy'; ")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("engine_dir: [\n", ":2: not YAML: "),
        ("- a\n", ": found list; allowed: names with values"),
        ("", ": found NoneType; allowed: names with values"),
        ("engine_dir: a\nengine_dir: b\n", ":2: engine_dir: written twice"),
        (
            "engine_dir: a\ntokenizer_dir: b\nparameters:\n  n: 1\n  n: 2\n",
            ":5: n: written twice",
        ),
        ("engine_dir: a\n", "tokenizer_dir: not given; it is needed"),
        ("engine_dir: a\ntokenizer_dir: b\nbeams: 2\n", ":3: beams: unknown name; allowed: "),
        (
            "engine_dir: a\ntokenizer_dir: b\nmax_beam_width: 0\n",
            ":3: max_beam_width: found 0; Input should be greater than or equal to 1",
        ),
        (
            "engine_dir: a\ntokenizer_dir: b\nparameters:\n  decoding_mode: [top_k]\n",
            ":4: parameters.decoding_mode: allowed: text, a number, true or false",
        ),
        (
            "engine_dir: a\ntokenizer_dir: b\ndecoupled: true\nparameters: {decoupled_mode: no}\n",
            ": parameters.decoupled_mode: decoupled is given too; keep one",
        ),
    ],
)
def test_a_wrong_file_is_refused(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "deployment.yaml"
    path.write_text(text)
    with pytest.raises(DescriptionError) as raised:
        from_yaml(path)
    assert problem in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(DescriptionError, match=r"x\.yaml: No such file"):
        from_yaml(tmp_path / "x.yaml")


def test_overrides_win_and_paths_follow_their_source(tmp_path: Path) -> None:
    path = tmp_path / "deployment.yaml"
    path.write_text(
        "engine_dir: engine\ntokenizer_dir: hf\nmax_beam_width: 2\ndecoupled: true\n"
        "parameters:\n  skip_special_tokens: false\n  normalize_log_probs: true\n"
    )
    read = from_yaml(
        path,
        {
            "tokenizer_dir": "elsewhere",
            "max_beam_width": "1",
            "parameters": {"decoupled_mode": "false", "normalize_log_probs": "false"},
        },
    )
    assert read.engine_dir == tmp_path / "engine"
    assert read.tokenizer_dir == Path.cwd() / "elsewhere"
    assert read.max_beam_width == 1
    assert read.decoupled is False
    assert read.parameters == {"skip_special_tokens": False, "normalize_log_probs": "false"}


def test_a_repository_for_another_machine(tmp_path: Path) -> None:
    built = engine.build(MODEL, tmp_path / "engine")
    with pytest.raises(DescriptionError, match=r"engine_dir: .* local_engine_dir"):
        template_parameters(described())
    answer = render(
        *("--engine-dir", "/models/engine", "--tokenizer-dir", "/models/hf"),
        *("--local-engine-dir", built, "--local-tokenizer-dir", MODEL),
        *("--triton-backend", "python", "--max-queue-size", "8", "-p", "exclude_input_in_output=1"),
        *("--output", tmp_path / "repository"),
    )
    assert answer.returncode == 1
    assert "exclude_input_in_output: found '1'; allowed: true or false" in answer.stderr
    answer = render(
        *("--engine-dir", "/models/engine", "--tokenizer-dir", "/models/hf"),
        *("--local-engine-dir", built, "--local-tokenizer-dir", MODEL),
        *("--triton-backend", "python", "--max-queue-size", "8"),
        *("-p", "exclude_input_in_output=true", "--output", tmp_path / "repository"),
    )
    assert answer.returncode == 0
    assert check(tmp_path / "repository", built, MODEL) == []
    core = read_configs(tmp_path / "repository")["tensorrt_llm"]
    assert core.parameters["gpt_model_path"].string_value == "/models/engine"


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    built = engine.build(MODEL, tmp_path / "engine")
    (tmp_path / "file").touch()
    answer = render("--engine-dir", built, "--tokenizer-dir", MODEL, "--output", tmp_path / "file")
    assert answer.returncode == 1
    [line] = answer.stderr.splitlines()
    assert line.startswith("gateway repo render: ")
    assert str(tmp_path / "file") in line


def test_a_model_that_answers_once_is_rendered_with_a_warning(tmp_path: Path) -> None:
    built = engine.build(MODEL, tmp_path / "engine")
    answer = render(
        *("--engine-dir", built, "--tokenizer-dir", MODEL, "--triton-backend", "python"),
        *("--decoupled", "false", "--output", tmp_path / "repository"),
    )
    assert answer.returncode == 0
    assert "warning  tensorrt_llm: decoupled_mode\n" in answer.stdout
    configs = read_configs(tmp_path / "repository")
    for model in ("tensorrt_llm", "tensorrt_llm_bls"):
        assert not configs[model].model_transaction_policy.decoupled


def test_print_shows_the_parameters_and_writes_nothing(tmp_path: Path) -> None:
    built = engine.build(MODEL, tmp_path / "engine")
    answer = render("--engine-dir", built, "--tokenizer-dir", MODEL, "--print")
    assert answer.returncode == 0
    shown = dict(line.split(": ", 1) for line in answer.stdout.splitlines())
    assert shown["engine_dir"] == json.dumps(str(built))
    assert shown["triton_max_batch_size"] == "64"
    assert shown["decoupled_mode"] == "true"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["engine"]


def test_every_field_has_a_text_and_an_option_and_is_a_template_parameter() -> None:
    fields: Mapping[str, Any] = DeploymentDescription.model_fields
    assert [name for name in fields if name != "parameters"] == list(FIELDS)
    ours = {"release", "decoupled", "local_engine_dir", "local_tokenizer_dir", "parameters"}
    assert set(fields) - ours <= {entry.name for entry in PARAMETERS}
    parser = argparse.ArgumentParser()
    repo.add_arguments(parser)
    parsed = parser.parse_args(["render", "--print", "--max-beam-width", "3"])
    assert set(FIELDS) <= set(vars(parsed))
    assert parsed.max_beam_width == "3"


def test_the_cpu_engine_says_what_it_was_built_with(tmp_path: Path) -> None:
    built = engine.build(
        MODEL,
        tmp_path / "engine",
        dtype="bfloat16",
        lora_target_modules=["attn_q"],
        max_beam_width=3,
    )
    read = read_engine_config(built)
    assert (read.lora_dtype, read.max_beam_width) == ("bfloat16", 3)
    values = template_parameters(described(local_engine_dir=built))
    assert values["lora_weights_data_type"] == "TYPE_BF16"

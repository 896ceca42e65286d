"""The renderer, checked by parsing its output with Triton's protobuf."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import text_format
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.grpc import model_config_pb2

from triton_repo.parameters import BLS, CORE, ENSEMBLE, MODELS, Value, parameters_of
from triton_repo.releases import DEFAULT, RELEASES, template_of
from triton_repo.render import TEMPLATES, RenderError, render

MANDATORY: dict[str, Value] = {
    "triton_max_batch_size": 64,
    "decoupled_mode": True,
    "logits_datatype": "TYPE_FP32",
    "engine_dir": "/models/engine",
    "tokenizer_dir": "/models/tokenizer",
    "preprocessing_instance_count": 1,
    "postprocessing_instance_count": 2,
    "bls_instance_count": 3,
    "triton_backend": "python",
    "max_queue_delay_microseconds": 0,
    "encoder_input_features_data_type": "TYPE_FP16",
    "batching_strategy": "inflight_fused_batching",
}


def rendered(folder: Path, **parameters: Value) -> dict[str, Any]:
    render(folder, MANDATORY | parameters)
    configs = {}
    for model in MODELS:
        config = model_config_pb2.ModelConfig()
        text_format.Parse((folder / model / "config.pbtxt").read_text(encoding="utf-8"), config)
        configs[model] = config
    return configs


def problem(folder: Path, parameters: dict[str, Value]) -> str:
    with pytest.raises(RenderError) as raised:
        render(folder, parameters)
    assert not folder.exists()
    return str(raised.value)


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("model", MODELS)
def test_the_table_and_the_templates_have_the_same_parameters(model: str, release: str) -> None:
    template = (TEMPLATES / model / "config.pbtxt").read_text(encoding="utf-8")
    names = set(re.findall(r"\$\{(\w+)\}", template_of(release, template)))
    if "lora_weights" in template:
        names.add("lora_weights_data_type")
    assert names == {entry.name for entry in parameters_of(release) if model in entry.models}


def test_a_rendered_repository_has_what_triton_needs(tmp_path: Path) -> None:
    configs = rendered(tmp_path / "repository")
    assert {name: config.name for name, config in configs.items()} == {m: m for m in MODELS}
    assert {config.max_batch_size for config in configs.values()} == {64}
    assert configs[CORE].model_transaction_policy.decoupled
    assert configs[BLS].model_transaction_policy.decoupled
    assert configs[BLS].instance_group[0].count == 3
    for model in MODELS:
        modules = {path.name for path in (tmp_path / "repository" / model / "1").iterdir()}
        assert ("model.py" in modules) == (model != ENSEMBLE)


def test_mandatory_inputs_are_those_of_the_upstream_repository(tmp_path: Path) -> None:
    mandatory = {
        model: {tensor.name for tensor in config.input if not tensor.optional}
        for model, config in rendered(tmp_path).items()
    }
    assert mandatory == {
        "preprocessing": {"QUERY", "REQUEST_OUTPUT_LEN"},
        "tensorrt_llm": {"input_lengths", "request_output_len"},
        "postprocessing": {"TOKENS_BATCH", "SEQUENCE_LENGTH"},
        "ensemble": {"text_input", "max_tokens"},
        "tensorrt_llm_bls": {"text_input", "max_tokens"},
    }


def test_the_ensemble_connects_tensors_of_one_type(tmp_path: Path) -> None:
    configs = rendered(tmp_path)
    ensemble = configs[ENSEMBLE]
    types = {tensor.name: tensor.data_type for tensor in ensemble.input}
    used = set()
    for step in ensemble.ensemble_scheduling.step:
        inputs = {tensor.name: tensor.data_type for tensor in configs[step.model_name].input}
        outputs = {tensor.name: tensor.data_type for tensor in configs[step.model_name].output}
        for name, source in step.input_map.items():
            assert inputs[name] == types[source], name
            used.add(source)
        types |= {target: outputs[name] for name, target in step.output_map.items()}
    assert used >= {tensor.name for tensor in ensemble.input}
    assert {tensor.name: types[tensor.name] for tensor in ensemble.output} == {
        tensor.name: tensor.data_type for tensor in ensemble.output
    }


def test_values_arrive_and_what_is_not_given_is_empty(tmp_path: Path) -> None:
    configs = rendered(
        tmp_path,
        triton_backend="tensorrtllm",
        triton_max_batch_size="8",
        decoupled_mode="False",
        max_queue_size=7,
        kv_cache_free_gpu_mem_fraction=0.5,
        medusa_choices="{0, 0}, {0, 1}",
        enable_kv_cache_reuse=True,
        accumulate_tokens="true",
    )
    core = configs[CORE]
    assert core.backend == "tensorrtllm"
    assert list(core.dynamic_batching.preferred_batch_size) == [8]
    assert core.dynamic_batching.default_queue_policy.max_queue_size == 7
    assert not core.model_transaction_policy.decoupled
    values = {name: value.string_value for name, value in core.parameters.items()}
    assert values["gpt_model_path"] == "/models/engine"
    assert values["gpt_model_type"] == "inflight_fused_batching"
    assert values["kv_cache_free_gpu_mem_fraction"] == "0.5"
    assert values["medusa_choices"] == "{0, 0}, {0, 1}"
    assert values["enable_kv_cache_reuse"] == "true"
    assert values["max_beam_width"] == ""
    assert values["guided_decoding_backend"] == ""
    assert values["tokenizer_dir"] == "/models/tokenizer"
    assert configs[BLS].parameters["accumulate_tokens"].string_value == "true"


def test_rendering_again_replaces_and_a_subset_needs_only_its_own(tmp_path: Path) -> None:
    own = {
        entry.name: MANDATORY[entry.name]
        for entry in parameters_of(DEFAULT)
        if entry.mandatory and CORE in entry.models
    }
    # The core model needs a tokenizer only for guided decoding.
    assert "tokenizer_dir" not in own
    render(tmp_path, own | {"triton_max_batch_size": 4}, models=[CORE])
    render(tmp_path, own, models=[CORE])
    assert [path.name for path in tmp_path.iterdir()] == [CORE]
    assert "max_batch_size: 64" in (tmp_path / CORE / "config.pbtxt").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", sorted(MANDATORY))
def test_a_missing_mandatory_parameter_is_named(tmp_path: Path, name: str) -> None:
    given = {key: value for key, value in MANDATORY.items() if key != name}
    assert problem(tmp_path / "new", given).startswith(f"{name}: found nothing; allowed: ")


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("triton_max_batch_size", 0, "an integer of at least 1"),
        ("triton_max_batch_size", 1.0, "an integer of at least 1"),
        ("triton_max_batch_size", True, "an integer of at least 1"),
        ("triton_max_batch_size", "8 }", "an integer of at least 1"),
        ("max_queue_size", -1, "an integer of at least 0"),
        ("decoupled_mode", "yes", "true or false"),
        ("decoupled_mode", 1, "true or false"),
        ("triton_backend", "onnx", "one of tensorrtllm, python"),
        ("logits_datatype", "FP32", "one of TYPE_FP32, TYPE_FP16, TYPE_BF16"),
        ("kv_cache_free_gpu_mem_fraction", 1.5, "a number above 0 and up to 1"),
        ("kv_cache_free_gpu_mem_fraction", "nan", "a number above 0 and up to 1"),
        ("guided_decoding_backend", "outlines", "one of xgrammar, llguidance"),
        ("engine_dir", "${engine_dir}", "a printable, non-empty string without ${"),
        ("engine_dir", "a\nb", "a printable, non-empty string without ${"),
        ("gpu_device_ids", "0,1;", "GPU numbers, "),
        ("eagle_choices", "{0, {1}", "paths of a token tree"),
        ("max_attention_window_size", "12,", "integers joined by commas"),
    ],
)
def test_a_wrong_value_is_named_with_what_is_allowed(
    tmp_path: Path, name: str, value: Value, allowed: str
) -> None:
    text = problem(tmp_path / "new", MANDATORY | {name: value})
    assert text.startswith(f"{name}: found {value!r}; allowed: {allowed}")
    assert "\n" not in text


def test_unknown_names_are_named_and_all_problems_come_at_once(tmp_path: Path) -> None:
    text = problem(tmp_path / "new", MANDATORY | {"decoupled": True, "triton_max_batch_size": 0})
    unknown, wrong = text.split("\n")
    assert unknown.startswith("decoupled: unknown parameter; allowed for preprocessing, ")
    assert wrong.startswith("triton_max_batch_size: found 0; ")
    with pytest.raises(RenderError, match=r"^models: found llm; allowed: preprocessing, "):
        render(tmp_path / "new", MANDATORY, models=["llm"])


@given(st.text(st.characters() | st.sampled_from("\"\\'{}$#\n")))
def test_any_text_comes_through_or_is_refused(text: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        try:
            configs = rendered(Path(folder), tokenizer_dir=text)
        except RenderError:
            assert not text.isprintable() or not text or "${" in text
        else:
            parameters = configs["preprocessing"].parameters
            assert parameters["tokenizer_dir"].string_value == text

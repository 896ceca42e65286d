"""Templates of each release, compared with upstream's: `tests/data/inflight_batcher_llm/`.

`tensors.csv` and `parameters.csv` were copied by hand from tensorrtllm_backend's tags v0.17.0 and
v0.19.0. Those of 0.20 are v0.19.0's with the names that the branch r25.05 changed. A column names
the releases of a row if not all have it. `${name}` is a value that the template leaves open.
"""

from __future__ import annotations

import csv
import re
import runpy
from collections.abc import Iterator, Mapping
from pathlib import Path
from string import Template
from types import SimpleNamespace
from typing import Any

import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from gateway.triton.names import RENAMED
from tests.support.triton_server import repository_parameters
from triton_repo.cpu_executor.result import KvCacheMetrics
from triton_repo.fill_template import fill, parse_substitutions
from triton_repo.gpt_repository import render_gpt
from triton_repo.parameters import BLS, CORE, ENSEMBLE, MODELS, POSTPROCESSING, PREPROCESSING
from triton_repo.releases import RELEASES, V0_17, V0_19, V0_20
from triton_repo.render import TEMPLATES, RenderError, core_inputs, render

FACTS = Path(__file__).parents[1] / "data" / "inflight_batcher_llm"
GIVEN = repository_parameters(Path("/models")) | {
    "logits_datatype": "TYPE_FP16",
    "encoder_input_features_data_type": "TYPE_BF16",
}
# Upstream has guided decoding since v0.19. Our v0.17 templates have it too.
GUIDES = ("guided_decoding_guide_type", "guided_decoding_guide")
EXTRA_TENSORS = {
    V0_17: {(model, "input", name) for model in (CORE, ENSEMBLE, BLS) for name in GUIDES},
    V0_19: set(),
    V0_20: set(),
}
# Parameters that upstream's models lack.
OURS = {
    (PREPROCESSING, "trust_remote_code"),
    (POSTPROCESSING, "trust_remote_code"),
    (BLS, "cancellation_check_period_ms"),
}
EXTRA_PARAMETERS = {
    V0_17: OURS
    | {
        (CORE, "guided_decoding_backend"),
        (CORE, "tokenizer_dir"),
        (CORE, "xgrammar_tokenizer_info_path"),
    },
    V0_19: OURS,
    V0_20: OURS,
}
# The arguments for fill_template.py in the README of both releases, by model.
README = {
    ENSEMBLE: "triton_max_batch_size:4,logits_datatype:TYPE_FP32",
    PREPROCESSING: "tokenizer_dir:/hf,triton_max_batch_size:4,preprocessing_instance_count:1",
    CORE: "triton_backend:tensorrtllm,triton_max_batch_size:4,decoupled_mode:false,"
    "engine_dir:/engine,max_queue_delay_microseconds:0,batching_strategy:inflight_fused_batching,"
    "max_queue_size:0,encoder_input_features_data_type:TYPE_FP16,logits_datatype:TYPE_FP32",
    POSTPROCESSING: "tokenizer_dir:/hf,triton_max_batch_size:4,postprocessing_instance_count:1",
    BLS: "triton_max_batch_size:4,decoupled_mode:false,bls_instance_count:1,"
    "logits_datatype:TYPE_FP32",
}


def facts(name: str, release: str) -> Iterator[dict[str, str]]:
    with (FACTS / name).open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            only = row.pop("only").split()
            if not only or release in only:
                yield row


def configs(folder: Path, release: str, **parameters: str) -> Mapping[str, Any]:
    render(folder, GIVEN | parameters, release=release)
    return {
        model: text_format.Parse(
            (folder / model / "config.pbtxt").read_text(encoding="utf-8"),
            model_config_pb2.ModelConfig(),
        )
        for model in MODELS
    }


@pytest.mark.parametrize("release", RELEASES)
def test_tensors_are_those_of_the_release(tmp_path: Path, release: str) -> None:
    wanted = {
        (row["model"], row["direction"], row["name"]): (
            Template(row["data_type"]).substitute(GIVEN),
            row["dims"],
            bool(row["optional"]),
            bool(row["reshape"]),
        )
        for row in facts("tensors.csv", release)
    }
    found = {
        (model, direction, tensor.name): (
            model_config_pb2.DataType.Name(tensor.data_type),
            " ".join(map(str, tensor.dims)),
            direction == "input" and tensor.optional,
            tensor.HasField("reshape"),
        )
        for model, config in configs(tmp_path, release).items()
        for direction, tensors in (("input", config.input), ("output", config.output))
        for tensor in tensors
    }
    extra = EXTRA_TENSORS[release]
    assert found.keys() - wanted.keys() == extra
    assert {key: value for key, value in found.items() if key not in extra} == wanted


@pytest.mark.parametrize("release", RELEASES)
def test_parameters_are_those_of_the_release(tmp_path: Path, release: str) -> None:
    wanted = {}
    for row in facts("parameters.csv", release):
        hole = re.fullmatch(r"\$\{(\w+)\}", row["value"])
        wanted[row["model"], row["key"]] = (
            str(GIVEN.get(hole[1], "")) if hole is not None else row["value"]
        )
    if release != V0_17:
        # Upstream documents true as the default since v0.19. Our templates set it explicitly.
        wanted[CORE, "enable_kv_cache_reuse"] = "true"
    found = {
        (model, key): value.string_value
        for model, config in configs(tmp_path, release).items()
        for key, value in config.parameters.items()
    }
    extra = EXTRA_PARAMETERS[release]
    assert found.keys() - wanted.keys() == extra
    assert {key: value for key, value in found.items() if key not in extra} == wanted


@pytest.mark.parametrize("model", MODELS)
def test_the_arguments_of_upstreams_readme_fill_a_template(model: str) -> None:
    template = (TEMPLATES / model / "config.pbtxt").read_text(encoding="utf-8")
    filled = fill(template, parse_substitutions(README[model]))
    # Open values stay as strings, which mean "not set".
    left = re.findall(r"(?m)^[^#\n]*[^\"]\$\{\w+\}", filled)
    assert left == []
    config = text_format.Parse(filled, model_config_pb2.ModelConfig())
    assert config.max_batch_size == 4


def test_preprocessing_batches_since_v0_19(tmp_path: Path) -> None:
    old, *later = (
        configs(tmp_path / release, release, max_queue_size="7")[PREPROCESSING]
        for release in RELEASES
    )
    assert not old.HasField("dynamic_batching")
    assert [new.dynamic_batching.default_queue_policy.max_queue_size for new in later] == [7, 7]


def test_a_parameter_of_the_other_release_is_refused(tmp_path: Path) -> None:
    for release, name in (
        *((V0_17, "multimodal_model_path"), (V0_19, "visual_model_path")),
        (V0_20, "visual_model_path"),
    ):
        with pytest.raises(RenderError, match=f"^{name}: unknown parameter"):
            render(tmp_path / "new", GIVEN | {name: "/x"}, release=release)
    with pytest.raises(RenderError, match=r"^release: found 0\.18; allowed: 0\.17, 0\.19, 0\.20$"):
        render(tmp_path / "new", GIVEN, release="0.18")


def test_no_mark_of_a_release_is_left(tmp_path: Path) -> None:
    for release in RELEASES:
        render(tmp_path, GIVEN, release=release)
        for model in MODELS:
            text = (tmp_path / model / "config.pbtxt").read_text(encoding="utf-8")
            assert not re.search(r"#0\.\d\d", text)
            said = "since container 25.05" if release == V0_20 else f"v{release}"
            assert f"inflight_batcher_llm {said}" in text
            for module in (tmp_path / model / "1").glob("*.py"):
                assert not re.search(r"# (since|until) 0\.", module.read_text(encoding="utf-8"))


@pytest.mark.parametrize("release", RELEASES)
def test_the_models_read_the_names_of_their_set_alone(tmp_path: Path, release: str) -> None:
    render(tmp_path, GIVEN, release=release)
    gpt = {name: GIVEN[name] for name in ("engine_dir", "tokenizer_dir")}
    render_gpt(tmp_path / "gpt", gpt, release=release)
    declared = {name for names in RENAMED for name in names if name in core_inputs(release)}
    assert len(declared) == len(RENAMED)
    for module in (
        tmp_path / CORE / "1" / "executor_request.py",
        tmp_path / BLS / "1" / "model.py",
        tmp_path / "gpt" / CORE / "1" / "executor_request.py",
    ):
        text = module.read_text(encoding="utf-8")
        assert {name for names in RENAMED for name in names if f'"{name}"' in text} == declared


@pytest.mark.parametrize("release", RELEASES)
def test_the_gpt_repository_has_the_names_of_the_release(tmp_path: Path, release: str) -> None:
    given = {name: GIVEN[name] for name in ("engine_dir", "tokenizer_dir")}
    render_gpt(tmp_path, given, release=release)
    ensemble, core = (
        text_format.Parse(
            (tmp_path / model / "config.pbtxt").read_text(encoding="utf-8"),
            model_config_pb2.ModelConfig(),
        )
        for model in (ENSEMBLE, CORE)
    )
    named = {"seed", "min_tokens"} if release == V0_20 else {"random_seed", "min_length"}
    renamed = {name for names in RENAMED for name in names}
    for config in (ensemble, core):
        assert {tensor.name for tensor in config.input} & renamed == named
    step = next(one for one in ensemble.ensemble_scheduling.step if one.model_name == CORE)
    assert {name for name in step.input_map if name in renamed} == named
    assert all(step.input_map[name] == name for name in named)
    with pytest.raises(RenderError, match=r"^release: found 0\.18; "):
        render_gpt(tmp_path / "new", given, release="0.18")


def test_no_more_of_the_executors_statistics_is_read_than_is_wanted() -> None:
    """Check statistics of v0.17's executor, which may lack times and draft tokens."""
    module = runpy.run_path(str(TEMPLATES / CORE / "1" / "perf_metrics.py"))
    v0_17 = SimpleNamespace(kv_cache_metrics=KvCacheMetrics(num_reused_blocks=3))
    found = module["perf_tensors"](v0_17, {"output_ids", "kv_cache_reused_blocks"})
    assert {name: array.tolist() for name, array in found.items()} == {
        "kv_cache_reused_blocks": [[3]]
    }

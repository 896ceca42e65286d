"""`gateway repo check`: each planted mistake is found, and no other."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from ops.deployment.check import check
from tests.support.repositories import (
    BLS,
    CORE,
    ENSEMBLE,
    FindingKey,
    RenderedRepository,
    error,
    note,
    warning,
)
from tests.support.triton_server import MODEL


@dataclass(frozen=True)
class Mistake:
    """A mistake that `plant` makes. The finding's text must contain `problem` and `fix`."""

    plant: Callable[[RenderedRepository], object]
    finding: FindingKey
    problem: str
    fix: str


def _not_decoupled(place: RenderedRepository) -> None:
    for model in (CORE, BLS):
        place.edit(model, "decoupled: true", "decoupled: false")


def _bfloat16_engine(place: RenderedRepository) -> None:
    place.build("pretrained_config", dtype="bfloat16")
    place.build("build_config.plugin_config", lora_plugin="auto")


def _old_text_names(place: RenderedRepository) -> None:
    """Combine the core model of a newer release with the BLS model of an older one."""
    place.rename(CORE, "min_length", "min_tokens")
    place.edit(ENSEMBLE, 'key: "min_length"', 'key: "min_tokens"')


def _gpu_engine(place: RenderedRepository) -> None:
    """Make the engine one for two GPUs, with a file missing."""
    (place.engine / "model.safetensors").unlink()
    (place.engine / "rank0.engine").touch()
    place.build("pretrained_config.mapping", world_size=2, tp_size=2)


def _cxx_backend(place: RenderedRepository) -> None:
    place.edit(CORE, 'backend: "python"', 'backend: "tensorrtllm"')
    (place.engine / "rank0.engine").touch()


def _engines(place: RenderedRepository, count: int, gpus: str) -> None:
    _cxx_backend(place)
    place.set(CORE, "guided_decoding_backend", "")
    place.set(CORE, "gpu_device_ids", gpus)
    place.edit(CORE, "count: 1", f"count: {count}")


def _core_alone_of(place: RenderedRepository, version: str) -> None:
    """Leave the C++ core model alone, with an engine of `version` and its statistics parameter."""
    for name in (ENSEMBLE, BLS):
        shutil.rmtree(place.repository / name)
    _cxx_backend(place)
    place.set(CORE, "guided_decoding_backend", "")
    place.edit(CORE, '"return_kv_cache_reuse_stats"', '"return_perf_metrics"')
    place.build("", version=version)


def _unset_fraction(place: RenderedRepository) -> None:
    place.set(CORE, "kv_cache_free_gpu_mem_fraction", "${kv_cache_free_gpu_mem_fraction}")


MISTAKES: dict[str, Mistake] = {
    "streaming without decoupled": Mistake(
        _not_decoupled,
        warning(CORE, "decoupled_mode"),
        "every streaming request fails",
        "decoupled: true",
    ),
    "BLS not decoupled like the core": Mistake(
        lambda place: place.edit(BLS, "decoupled: true", "decoupled: false"),
        error(BLS, "decoupled_mode"),
        "false here, true in tensorrt_llm",
        "set decoupled: true in tensorrt_llm_bls",
    ),
    "a number left unfilled": Mistake(
        lambda place: place.edit(CORE, "max_queue_size: 64", "max_queue_size: ${max_queue_size}"),
        error(CORE, "max_queue_size"),
        "cannot parse config.pbtxt",
        '"max_queue_size:VALUE"',
    ),
    "a type left unfilled": Mistake(
        lambda place: place.edit(
            BLS, '"context_logits" data_type: TYPE_FP32', '"context_logits" data_type: ${logits}'
        ),
        error(BLS, "logits"),
        "${logits} is unfilled",
        "gateway repo fill -i",
    ),
    "the backend left unfilled": Mistake(
        lambda place: place.edit(CORE, 'backend: "python"', 'backend: "${triton_backend}"'),
        error(CORE, "triton_backend"),
        "no backend of that name",
        "triton_backend:tensorrtllm",
    ),
    "an optional parameter left unfilled": Mistake(
        _unset_fraction,
        note(CORE, "parameters"),
        "means not set: kv_cache_free_gpu_mem_fraction",
        "server's defaults",
    ),
    "the engine's folder left unfilled": Mistake(
        lambda place: place.set(CORE, "gpt_model_path", "${engine_dir}"),
        error(CORE, "engine_dir"),
        "gpt_model_path is not set",
        '"engine_dir:VALUE"',
    ),
    "a batching strategy that does not exist": Mistake(
        lambda place: place.set(CORE, "gpt_model_type", "inflight"),
        error(CORE, "batching_strategy"),
        "Invalid gpt_model_type",
        "inflight_fused_batching",
    ),
    "LoRA weights of another type than the engine's": Mistake(
        _bfloat16_engine,
        error(CORE, "lora_weights_data_type"),
        "declared TYPE_FP16",
        "declare TYPE_BF16",
    ),
    "a LoRA host cache below one adapter": Mistake(
        lambda place: place.set(CORE, "lora_cache_host_memory_bytes", "1000000"),
        error(CORE, "lora_cache_host_memory_bytes"),
        "Not enough space allocated to host LoRA cache",
        "at least 3145728",
    ),
    "LoRA settings on an engine without LoRA": Mistake(
        lambda place: (
            place.build("build_config.plugin_config", lora_plugin=None),
            place.set(CORE, "lora_cache_max_adapter_size", "16"),
        ),
        error(CORE, "lora_cache_max_adapter_size"),
        "no LoRA plugin",
        "--lora_plugin auto",
    ),
    "enable_trt_overlap": Mistake(
        lambda place: place.add(CORE, "enable_trt_overlap", "true"),
        warning(CORE, "enable_trt_overlap"),
        "deprecated",
        "remove it",
    ),
    "max_kv_cache_length": Mistake(
        lambda place: place.add(CORE, "max_kv_cache_length", "4096"),
        warning(CORE, "max_kv_cache_length"),
        "renamed in v0.7",
        "max_attention_window_size",
    ),
    "max_num_sequences": Mistake(
        lambda place: place.add(CORE, "max_num_sequences", "64"),
        warning(CORE, "max_num_sequences"),
        "limits nothing",
        "max_queue_size",
    ),
    "worker_path with the Python backend": Mistake(
        lambda place: place.add(CORE, "worker_path", "/opt/worker"),
        error(CORE, "worker_path"),
        "refuses to load",
        "executor_worker_path",
    ),
    "tokenizer_type": Mistake(
        lambda place: place.add("preprocessing", "tokenizer_type", "auto"),
        warning("preprocessing", "tokenizer_type"),
        "removed in v0.9",
        "remove it",
    ),
    "a step's model is not there": Mistake(
        lambda place: (
            shutil.rmtree(place.repository / "postprocessing"),
            shutil.rmtree(place.repository / BLS),
        ),
        error(ENSEMBLE, "postprocessing"),
        "does not load the ensemble",
        "add the folder postprocessing",
    ),
    "a model that BLS calls is not there": Mistake(
        lambda place: place.set(BLS, "tensorrt_llm_model_name", "llama"),
        error(BLS, "llama"),
        "called by it",
        "add the folder llama",
    ),
    "no version folder": Mistake(
        lambda place: shutil.rmtree(place.repository / ENSEMBLE / "1"),
        error(ENSEMBLE, "version folder"),
        "no folder 1",
        "create",
    ),
    "no model.py": Mistake(
        lambda place: (place.repository / "preprocessing" / "1" / "model.py").unlink(),
        error("preprocessing", "1/model.py"),
        "missing",
        "of the same release",
    ),
    "a file that is no model configuration": Mistake(
        lambda place: place.edit("postprocessing", "max_batch_size: 16", "max_batch_size 16"),
        error("postprocessing", "config.pbtxt"),
        "6:16",
        "correct the file",
    ),
    "a folder that is no model": Mistake(
        lambda place: (place.repository / "notes").mkdir(),
        error("notes", "config.pbtxt"),
        "the file is missing",
        "correct the file",
    ),
    "a folder with another name": Mistake(
        lambda place: place.edit("postprocessing", 'name: "postprocessing"', 'name: "post"'),
        error("postprocessing", "name"),
        "found 'post' in a folder called postprocessing",
        'name: "postprocessing"',
    ),
    "a missing rank": Mistake(
        _gpu_engine,
        error(CORE, "rank1.engine"),
        "world_size 2",
        "copy all files that trtllm-build wrote",
    ),
    "an engine folder that is not there": Mistake(
        lambda place: [
            place.set(model, "gpt_model_path", "/nowhere/engine")
            for model in (CORE, "preprocessing")
        ],
        error(CORE, "engine_dir"),
        "/nowhere/engine/config.json: there is no folder /nowhere/engine",
        "--engine-dir",
    ),
    "an engine with a LoRA module of a later release": Mistake(
        lambda place: place.build(
            "build_config.lora_config",
            lora_target_modules=["attn_q", "attn_k", "attn_v", "mamba_in_proj"],
        ),
        warning(CORE, "engine_dir"),
        "LoRA modules mamba_in_proj, which the gateway does not know",
        "nothing, if no adapter has them",
    ),
    "a Hugging Face folder as engine": Mistake(
        lambda place: [
            place.set(model, "gpt_model_path", str(place.tokenizer))
            for model in (CORE, "preprocessing")
        ],
        error(CORE, "engine_dir"),
        "Hugging Face model, not an engine",
        "correct engine_dir",
    ),
    "two engines": Mistake(
        lambda place: place.set("preprocessing", "gpt_model_path", "/models/other"),
        warning("preprocessing", "engine_dir"),
        "/models/other, but the engine served is in",
        "the same folder",
    ),
    "two tokenizers": Mistake(
        lambda place: place.set("postprocessing", "tokenizer_dir", str(MODEL)),
        error("postprocessing", "tokenizer_dir"),
        "token ids of one are not those of the other",
        "the same folder",
    ),
    "a tokenizer that is not there": Mistake(
        lambda place: place.tokenizer.rename(place.folder / "moved"),
        error("preprocessing", "tokenizer_dir"),
        "is not a folder",
        "--tokenizer-dir",
    ),
    "a tokenizer without chat template": Mistake(
        RenderedRepository.drop_chat_template,
        note("preprocessing", "tokenizer_dir"),
        "no chat template",
        "chat_template.jinja",
    ),
    "a batch above the engine's": Mistake(
        lambda place: place.build("build_config", max_batch_size=8),
        error(CORE, "triton_max_batch_size"),
        "found 16",
        "set triton_max_batch_size:8",
    ),
    "beams above the engine's": Mistake(
        lambda place: place.build("build_config", max_beam_width=1),
        error(CORE, "max_beam_width"),
        "says max_beam_width 1",
        "--max_beam_width 4",
    ),
    "logits of another type": Mistake(
        lambda place: place.build("pretrained_config", logits_dtype="float16"),
        error(CORE, "logits_datatype"),
        "declared TYPE_FP32",
        "declare TYPE_FP16",
    ),
    "KV cache reuse without paged context attention": Mistake(
        lambda place: place.build("build_config.plugin_config", use_paged_context_fmha=False),
        error(CORE, "enable_kv_cache_reuse"),
        "use_paged_context_fmha false",
        "--use_paged_context_fmha enable",
    ),
    "chunked context without a paged cache": Mistake(
        lambda place: (
            place.build("build_config", kv_cache_type="CONTINUOUS"),
            place.set(CORE, "enable_kv_cache_reuse", "false"),
            place.set(CORE, "enable_chunked_context", "true"),
        ),
        error(CORE, "enable_chunked_context"),
        "not paged",
        "--kv_cache_type paged",
    ),
    "host memory for blocks that are never reused": Mistake(
        lambda place: (
            place.set(CORE, "enable_kv_cache_reuse", "false"),
            place.set(CORE, "kv_cache_host_memory_bytes", "1000000000"),
        ),
        error(CORE, "kv_cache_host_memory_bytes"),
        "never used",
        "enable_kv_cache_reuse:true",
    ),
    "max_utilization without chunked context": Mistake(
        lambda place: place.set(CORE, "batch_scheduler_policy", "max_utilization"),
        warning(CORE, "batch_scheduler_policy"),
        "max_input_len (1024)",
        "enable_chunked_context:true",
    ),
    "one BLS": Mistake(
        lambda place: place.edit(BLS, "count: 4", "count: 1"),
        warning(BLS, "bls_instance_count"),
        "one request at a time",
        "bls_instance_count",
    ),
    "two postprocessings": Mistake(
        lambda place: place.edit("postprocessing", "count: 1", "count: 2"),
        warning("postprocessing", "postprocessing_instance_count"),
        "out of order",
        "postprocessing_instance_count:1",
    ),
    "one preprocessing": Mistake(
        lambda place: place.edit("preprocessing", "count: 2", "count: 1"),
        note("preprocessing", "preprocessing_instance_count"),
        "one process tokenizes",
        "preprocessing_instance_count:2",
    ),
    "a queue without bound": Mistake(
        lambda place: place.edit(CORE, "max_queue_size: 64", "max_queue_size: 0"),
        note(CORE, "max_queue_size"),
        "no bound",
        "max_queue_size",
    ),
    "exclude_input_in_output not set": Mistake(
        lambda place: place.set(CORE, "exclude_input_in_output", ""),
        note(CORE, "exclude_input_in_output"),
        "begin with the prompt",
        "exclude_input_in_output:true",
    ),
    "guided decoding without a tokenizer": Mistake(
        lambda place: place.set(CORE, "tokenizer_dir", ""),
        error(CORE, "guided_decoding_backend"),
        "tokenizer_dir is not set",
        "the tokenizer's folder",
    ),
    "guided decoding in C++ without the tokenizer's file": Mistake(
        _cxx_backend,
        error(CORE, "guided_decoding_backend"),
        "xgrammar_tokenizer_info_path is not set",
        "generate_xgrammar_tokenizer_info.py",
    ),
    "an ensemble from before LoRA": Mistake(
        RenderedRepository.drop_lora_from_ensemble,
        warning(ENSEMBLE, "lora_task_id"),
        "before v0.15",
        "take ensemble from v0.15 or later",
    ),
    "an ensemble of an older release": Mistake(
        lambda place: (
            shutil.rmtree(place.repository / BLS),
            place.rename(CORE, "random_seed", "seed"),
        ),
        error(ENSEMBLE, "random_seed"),
        "different releases",
        "the model's name for it is seed",
    ),
    "names that the model in Python does not read": Mistake(
        lambda place: (
            [shutil.rmtree(place.repository / name) for name in (ENSEMBLE, BLS)],
            place.edit(CORE, '"min_length"', '"min_tokens"'),
        ),
        error(CORE, "min_tokens"),
        "1/model.py reads min_length: requests that set min_tokens are answered as if they had not",
        "declare min_length in place of min_tokens",
    ),
    "names that the engine's release does not read": Mistake(
        lambda place: (
            _core_alone_of(place, "1.2.0rc3"),
            place.edit(CORE, '"min_length"', '"min_tokens"'),
        ),
        error(CORE, "random_seed"),
        "the engine is of TensorRT-LLM 1.2.0rc3, whose backend reads seed",
        "gateway repo render --release",
    ),
    "a release that exists with two sets of names": Mistake(
        lambda place: _core_alone_of(place, "0.19.0"),
        note(CORE, "release"),
        "container 25.05",
        "--trtllm-version 25.05",
    ),
    "a word that the engine reads as false": Mistake(
        lambda place: place.set(CORE, "enable_chunked_context", "yes"),
        error(CORE, "enable_chunked_context"),
        "found 'yes'; allowed: true or false: upstream's model reads it as false without a word",
        "write true or false",
    ),
    "a boolean with a blank behind it": Mistake(
        lambda place: place.set(CORE, "exclude_input_in_output", "true "),
        error(CORE, "exclude_input_in_output"),
        "found 'true '",
        "without blanks",
    ),
    "a boolean with a blank before it": Mistake(
        lambda place: place.set("postprocessing", "skip_special_tokens", " False"),
        error("postprocessing", "skip_special_tokens"),
        "found ' False'; allowed: true or false: upstream's model reads it as its default, true,",
        "without blanks",
    ),
    "a boolean of BLS that is none": Mistake(
        lambda place: place.set(BLS, "accumulate_tokens", "on"),
        error(BLS, "accumulate_tokens"),
        "found 'on'",
        "write true or false",
    ),
    "a fraction with a comma": Mistake(
        lambda place: place.set(CORE, "kv_cache_free_gpu_mem_fraction", "0,9"),
        error(CORE, "kv_cache_free_gpu_mem_fraction"),
        "found '0,9'; allowed: a number above 0 and up to 1",
        "write a number above 0 and up to 1",
    ),
    "a fraction in percent": Mistake(
        lambda place: place.set(CORE, "kv_cache_free_gpu_mem_fraction", "90"),
        error(CORE, "kv_cache_free_gpu_mem_fraction"),
        "found '90'",
        "up to 1",
    ),
    "a number in words": Mistake(
        lambda place: place.set(CORE, "max_tokens_in_paged_kv_cache", "4k"),
        error(CORE, "max_tokens_in_paged_kv_cache"),
        "found '4k'; allowed: an integer of at least 1",
        "write an integer",
    ),
    "four engines in Python": Mistake(
        lambda place: place.edit(CORE, "count: 1", "count: 4"),
        error(CORE, "instance_group"),
        "found 4: as many engines are loaded, and a stop request reaches one of them",
        "write count: 1",
    ),
    "four engines on the same GPUs": Mistake(
        lambda place: (
            _cxx_backend(place),
            place.set(CORE, "guided_decoding_backend", ""),
            place.edit(CORE, "count: 1", "count: 4"),
        ),
        error(CORE, "instance_group"),
        "onto the same GPUs, as gpu_device_ids is not set",
        "as many lists in gpu_device_ids",
    ),
    "fewer lists of GPUs than engines": Mistake(
        lambda place: _engines(place, 3, "0;1"),
        error(CORE, "instance_group"),
        "found 3: as many engines are loaded, but gpu_device_ids has 2 lists of GPUs (0;1)",
        "as many lists in gpu_device_ids",
    ),
    "more lists of GPUs than engines": Mistake(
        lambda place: _engines(place, 2, "0,1;2,3;4,5"),
        error(CORE, "instance_group"),
        "found 2: as many engines are loaded, but gpu_device_ids has 3 lists",
        "as many lists in gpu_device_ids",
    ),
    "a BLS of an older release": Mistake(
        _old_text_names,
        error(BLS, "min_length"),
        "tensorrt_llm calls this tensor min_tokens",
        "one release",
    ),
    "an ensemble with another type": Mistake(
        lambda place: place.edit(
            ENSEMBLE, '"lora_weights" data_type: TYPE_FP16', '"lora_weights" data_type: TYPE_BF16'
        ),
        error(ENSEMBLE, "lora_weights"),
        "TYPE_BF16 here, TYPE_FP16 as lora_weights of tensorrt_llm",
        "one type",
    ),
    "an ensemble with another type of output": Mistake(
        lambda place: place.edit(
            ENSEMBLE,
            '"generation_logits" data_type: TYPE_FP32',
            '"generation_logits" data_type: TYPE_FP16',
        ),
        error(ENSEMBLE, "generation_logits"),
        "TYPE_FP32 in the model that makes it",
        "one type",
    ),
    "a BLS with another type": Mistake(
        lambda place: place.edit(
            BLS, '"lora_weights" data_type: TYPE_FP16', '"lora_weights" data_type: TYPE_BF16'
        ),
        error(BLS, "lora_weights"),
        "requests with LoRA weights fail",
        "declare TYPE_FP16",
    ),
    "static batching that streams": Mistake(
        lambda place: (
            place.set(CORE, "gpt_model_type", "V1"),
            place.set(CORE, "enable_kv_cache_reuse", "false"),
            place.set(CORE, "guided_decoding_backend", ""),
        ),
        warning(CORE, "batching_strategy"),
        "in one piece",
        "inflight_fused_batching",
    ),
    "no core model": Mistake(
        lambda place: [shutil.rmtree(place.repository / name) for name in (CORE, BLS, ENSEMBLE)],
        error("", CORE),
        "nothing that runs an engine",
        "gateway repo render",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_planted_mistake_is_found_with_its_fix(place: RenderedRepository, name: str) -> None:
    mistake = MISTAKES[name]
    mistake.plant(place)
    findings = check(place.repository)
    assert [(one.severity, one.model, one.field) for one in findings] == [mistake.finding]
    assert mistake.problem in findings[0].problem
    assert mistake.fix in findings[0].fix


def test_engines_may_have_gpus_of_their_own(place: RenderedRepository) -> None:
    _engines(place, 2, "0,1;2,3")
    assert check(place.repository) == []

"""`gateway engine plan`: the commands for each release, and refused options."""

from __future__ import annotations

import io
import json
import shlex
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ops.cli import main
from tests.support.hf_configs import CONFIGS, write_config


@dataclass(frozen=True)
class _Answer:
    returncode: int
    stdout: str
    stderr: str


def _run(*arguments: object) -> _Answer:
    """Run the command in this process, which is faster."""
    with redirect_stdout(io.StringIO()) as stdout, redirect_stderr(io.StringIO()) as stderr:
        try:
            code = main(["engine", "plan", *map(str, arguments)])
        except SystemExit as error:
            code = int(error.code or 0)
    return _Answer(code, stdout.getvalue(), stderr.getvalue())


def _plan(*arguments: object) -> dict[str, Any]:
    answer = _run(*arguments, "--json")
    assert answer.returncode == 0, answer.stderr
    plan: dict[str, Any] = json.loads(answer.stdout)
    return plan


def _step(plan: dict[str, Any], name: str) -> list[str]:
    return next(step["arguments"] for step in plan["steps"] if step["name"] == name)


def _options(arguments: list[str]) -> dict[str, list[str]]:
    """Return the values of each option."""
    found: dict[str, list[str]] = {}
    for argument in arguments:
        if argument.startswith("--"):
            values = found[argument] = []
        elif found:
            values.append(argument)
    return found


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return write_config(tmp_path, "llama-3-8b")


def test_the_commands_for_0_17(llama: Path, tmp_path: Path) -> None:
    """Compare with the commands in the LoRA guide of tensorrtllm_backend v0.17, with all limits
    set.
    """
    plan = _plan(
        *(llama, "--dtype", "float16", "--tp", 2, "--lora-modules", "q_proj", "v_proj"),
        *("--max-lora-rank", 16, "--max-batch-size", 8, "--max-input-len", 4096),
        *("--max-seq-len", 8192, "--output", tmp_path / "out"),
    )
    out = tmp_path / "out"
    assert _step(plan, "convert") == [
        *("python3", "/app/tensorrt_llm/examples/llama/convert_checkpoint.py"),
        *("--model_dir", str(llama), "--output_dir", f"{out}/checkpoint"),
        *("--dtype", "float16", "--tp_size", "2", "--pp_size", "1"),
    ]
    assert _step(plan, "build") == [
        *("trtllm-build", "--checkpoint_dir", f"{out}/checkpoint"),
        *("--output_dir", f"{out}/engine"),
        *("--gemm_plugin", "float16", "--gpt_attention_plugin", "float16"),
        *("--max_batch_size", "8", "--max_input_len", "4096", "--max_seq_len", "8192"),
        *("--max_num_tokens", "8192", "--max_beam_width", "1"),
        *("--kv_cache_type", "paged", "--remove_input_padding", "enable"),
        *("--context_fmha", "enable", "--use_paged_context_fmha", "enable"),
        *("--lora_plugin", "float16", "--lora_target_modules", "attn_q", "attn_k", "attn_v"),
        *("--max_lora_rank", "16", "--workers", "2"),
    ]
    assert [step["name"] for step in plan["steps"]] == ["convert", "build"]


@pytest.mark.parametrize(
    ("version", "folder", "lengths", "paged"),
    [
        ("0.9.0", "llama", ("--max_output_len", "4096"), ("--paged_kv_cache", "enable")),
        ("v0.10", "llama", ("--max_output_len", "4096"), ("--paged_kv_cache", "enable")),
        ("0.11.0", "llama", ("--max_seq_len", "8192"), ("--paged_kv_cache", "enable")),
        ("0.13.0", "llama", ("--max_seq_len", "8192"), ("--kv_cache_type", "paged")),
        ("0.19.0", "llama", ("--max_seq_len", "8192"), ("--kv_cache_type", "paged")),
        ("0.20.0", "models/core/llama", ("--max_seq_len", "8192"), ("--kv_cache_type", "paged")),
        ("1.2.0rc6", "models/core/llama", ("--max_seq_len", "8192"), ("--kv_cache_type", "paged")),
    ],
)
def test_releases_differ(
    llama: Path, version: str, folder: str, lengths: tuple[str, str], paged: tuple[str, str]
) -> None:
    plan = _plan(llama, "--trtllm-version", version, "--max-input-len", 4096)
    script = _step(plan, "convert")[1]
    assert script == f"/app/tensorrt_llm/examples/{folder}/convert_checkpoint.py"
    options = _options(_step(plan, "build"))
    both = ("--max_output_len", "--max_seq_len", "--paged_kv_cache", "--kv_cache_type")
    assert {name: options[name] for name in both if name in options} == {
        lengths[0]: [lengths[1]],
        paged[0]: [paged[1]],
    }


def test_what_is_asked_for_is_in_the_build(llama: Path) -> None:
    plain = _options(_step(_plan(llama), "build"))
    assert not {"--lora_plugin", "--gather_context_logits", "--workers"} & plain.keys()
    plan = _plan(
        *(llama, "--gather-context-logits", "--gather-generation-logits"),
        *("--max-beam-width", 4, "--max-num-tokens", 2048, "--pp", 4, "--max-batch-size", 3),
    )
    options = _options(_step(plan, "build"))
    assert options["--gather_context_logits"] == options["--gather_generation_logits"] == []
    assert options["--max_beam_width"] == ["4"]
    assert options["--max_num_tokens"] == ["2048"]
    assert options["--max_batch_size"] == ["3"]
    assert options["--workers"] == ["4"]
    assert options["--gemm_plugin"] == ["bfloat16"]  # the dtype of the weights
    # The engine then processes a prompt of 8,192 tokens in chunks.
    assert plan["template_parameters"]["enable_chunked_context"] is True


def test_guided_decoding_needs_the_tokenizer_info(llama: Path, tmp_path: Path) -> None:
    plan = _plan(
        *(llama, "--guided-decoding", "--trtllm-version", "0.19.0", "--output", tmp_path),
        *("--trtllm-examples", "/src/examples"),
    )
    assert _step(plan, "tokenizer info") == [
        *("python3", "/src/examples/generate_xgrammar_tokenizer_info.py"),
        *("--model_dir", str(llama), "--output_dir", f"{tmp_path}/tokenizer_info"),
    ]


@pytest.mark.parametrize(
    ("name", "version", "folder", "options"),
    [
        ("mistral-7b", "0.17.0", "llama", {"--tp_size", "--pp_size"}),
        ("mixtral-8x7b", "0.17.0", "llama", {"--tp_size", "--pp_size"}),
        ("qwen2.5-7b", "0.17.0", "qwen", {"--tp_size", "--pp_size"}),
        ("qwen3-8b", "1.0.0", "models/core/qwen", {"--tp_size", "--pp_size"}),
        ("phi-3-mini", "0.17.0", "phi", {"--tp_size"}),
        ("gpt2", "0.17.0", "gpt", {"--tp_size", "--pp_size"}),
    ],
)
def test_the_script_of_each_architecture(
    tmp_path: Path, name: str, version: str, folder: str, options: set[str]
) -> None:
    plan = _plan(write_config(tmp_path, name), "--trtllm-version", version)
    convert = _step(plan, "convert")
    assert convert[1] == f"/app/tensorrt_llm/examples/{folder}/convert_checkpoint.py"
    assert _options(convert).keys() == {"--model_dir", "--output_dir", "--dtype", *options}


def test_gemma_has_options_of_its_own(tmp_path: Path) -> None:
    plan = _plan(write_config(tmp_path, "gemma-2-9b"), "--tp", 2, "--output", tmp_path)
    assert _step(plan, "convert")[1:] == [
        "/app/tensorrt_llm/examples/gemma/convert_checkpoint.py",
        *("--ckpt-type", "hf", "--model-dir", f"{tmp_path}/gemma-2-9b"),
        *("--output-model-dir", f"{tmp_path}/checkpoint"),
        *("--dtype", "bfloat16", "--world-size", "2"),
    ]


@pytest.mark.parametrize(
    ("name", "asked", "modules"),
    [
        ("llama-3-8b", ["v_proj"], ["attn_q", "attn_k", "attn_v"]),
        ("llama-3-8b", ["attn_dense"], ["attn_dense"]),
        ("llama-3-8b", ["gate_proj", "mlp_gate"], ["mlp_h_to_4h", "mlp_gate"]),
        (
            "llama-3-8b",
            ["all"],
            ["attn_q", "attn_k", "attn_v", "attn_dense", "mlp_h_to_4h", "mlp_4h_to_h", "mlp_gate"],
        ),
        ("phi-3-mini", ["qkv_proj", "gate_up_proj"], ["attn_qkv", "mlp_gate_up"]),
        ("phi-3-mini", ["attn_k"], ["attn_q", "attn_k", "attn_v"]),
        # PEFT uses one name for two modules.
        ("gpt2", ["c_proj"], ["attn_dense", "mlp_4h_to_h"]),
        ("mixtral-8x7b", ["w1", "gate"], ["moe_h_to_4h", "moe_router"]),
    ],
)
def test_lora_modules(tmp_path: Path, name: str, asked: list[str], modules: list[str]) -> None:
    plan = _plan(write_config(tmp_path, name), "--lora-modules", *asked)
    assert _options(_step(plan, "build"))["--lora_target_modules"] == modules


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("llama-3-8b", ["--lora-modules", "w1"], "--lora-modules: found w1; allowed for Llama"),
        ("llama-3-8b", ["--tp", "3"], "--tp: found 3; allowed: divisors of 32 attention heads"),
        ("llama-3-8b", ["--pp", "33"], "--pp: found 33; allowed: divisors of 32 layers"),
        (
            "llama-3-8b",
            ["--pp", "3", "--trtllm-version", "0.10.0"],
            "--pp: found 3; allowed: divisors of 32 layers",
        ),
        ("phi-3-mini", ["--pp", "2"], "--pp: found 2; the conversion script of Phi3ForCausalLM"),
        ("llama-3-8b", ["--max-seq-len", "200000"], "--max-seq-len: found 200000; allowed: up to"),
        (
            "llama-3-8b",
            ["--max-input-len", "9000"],
            "--max-input-len: found 9000; allowed: up to --max-seq-len, 8192",
        ),
        ("llama-3-8b", ["--gpu", "H900"], "--gpu: found 'H900'; allowed: T4"),
        ("llama-3-8b", ["--trtllm-version", "new"], "--trtllm-version: found 'new'; allowed"),
        ("llama-3-8b", ["--trtllm-version", "0.8.0"], "--trtllm-version: found 0.8.0; allowed"),
        ("llama-3-8b", ["--guided-decoding"], "--guided-decoding: in the Triton repository since"),
        ("qwen3-8b", [], "Qwen3ForCausalLM: converted since TensorRT-LLM 1.0, found 0.17"),
        (
            "gemma-2b",
            ["--lora-modules", "all"],
            "--lora-modules: LoRA with GemmaForCausalLM is served since TensorRT-LLM 0.19",
        ),
    ],
)
def test_refusals(tmp_path: Path, name: str, arguments: list[str], message: str) -> None:
    answer = _run(write_config(tmp_path, name), *arguments)
    assert answer.returncode == 1
    assert answer.stderr.startswith(f"gateway engine plan: {message}")
    assert answer.stdout == ""


def test_all_problems_at_once(tmp_path: Path) -> None:
    model = write_config(
        tmp_path, "gemma-2b", quantization_config={"quant_method": "gptq"}, num_key_value_heads=3
    )
    answer = _run(model, "--pp", 2, "--tp", 2, "--guided-decoding")
    lines = answer.stderr.splitlines()
    assert [line.split(": ")[1].partition(",")[0] for line in lines] == [
        *("--guided-decoding", str(model), "--pp", "--tp")
    ]
    assert "quantized (gptq)" in lines[1]


def test_an_unknown_architecture_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    answer = _run(write_config(tmp_path, "llama-3-8b", architectures=["FalconForCausalLM"]))
    assert answer.returncode == 1
    known = {config["architectures"][0] for config in CONFIGS.values()}
    assert all(name in answer.stderr for name in known)


@pytest.mark.parametrize("version", ["1.3.0rc15", "1.3.0", "2.0"])
def test_releases_without_the_tools_are_told_so(llama: Path, version: str) -> None:
    answer = _run(llama, "--trtllm-version", version)
    assert answer.returncode == 2
    assert f"TensorRT-LLM {version} builds no engines" in answer.stderr
    assert "llmapi repository: gateway import --llmapi" in answer.stderr


@pytest.mark.parametrize("arguments", [["--tp", "0"], ["--dtype", "float32"], ["--gp", "H100"]])
def test_wrong_command_lines(llama: Path, arguments: list[str]) -> None:
    assert _run(llama, *arguments).returncode == 2


def test_the_printed_commands_are_those_of_the_plan(llama: Path) -> None:
    """Check that a shell splits the printed text into the commands that --run executes."""
    arguments = (llama, "--lora-modules", "all", "--output", "/has space/and 'quote'")
    answer = _run(*arguments)
    commands = [
        shlex.split(block.partition("\n")[2].replace("\\\n", ""))
        for block in answer.stdout.split("\n\n")[:2]
    ]
    assert commands == [step["arguments"] for step in _plan(*arguments)["steps"]]


def test_what_fits(llama: Path) -> None:
    answer = _run(llama, "--gpu", "h100", "--lora-modules", "all", "--max-lora-rank", 16)
    assert answer.returncode == 0
    lines = {line.split("  ")[0]: " ".join(line.split()) for line in answer.stdout.splitlines()}
    assert lines["weights"] == "weights 16.06 GB"
    assert lines["KV cache per token"] == "KV cache per token 131,072 bytes"
    assert "8 adapters of rank 16" in lines["LoRA cache"]
    assert "fits" in answer.stdout.splitlines()


@pytest.mark.parametrize(
    ("arguments", "advice"),
    [
        (["--gpu", "A10", "--max-batch-size", "4000"], "--max-batch-size 8"),
        (["--gpu", "L4", "--max-seq-len", "100000"], "--max-seq-len"),
        (["--gpu", "L4", "--lora-modules", "all", "--lora-adapters", "60"], "--lora-adapters 1"),
        (["--gpu", "A10", "--gather-context-logits", "--max-seq-len", "32768"], "no --gather"),
        (["--gpu", "T4"], "--tp 2: 2 GPUs of this kind"),
    ],
)
def test_what_does_not_fit_says_what_would(llama: Path, arguments: list[str], advice: str) -> None:
    answer = _run(llama, *arguments)
    assert answer.returncode == 1
    assert "does not fit" in answer.stdout
    assert f"would fit with {advice}" in answer.stdout
    assert "would fit with --gpu " in answer.stdout


def test_advice_that_is_followed_is_right(llama: Path) -> None:
    """Check that following each suggestion of a single option gives a plan that fits."""
    arguments = [llama, "--gpu", "L4", "--max-seq-len", 100_000, "--gather-context-logits"]
    answer = _run(*arguments)
    advice = [
        line.removeprefix("  would fit with ").partition(",")[0].partition(":")[0]
        for line in answer.stdout.splitlines()
        if line.startswith("  would fit with --")
    ]
    assert advice
    for line in advice:
        changed = shlex.split(line.partition(" or ")[0])
        assert _run(*arguments, *changed).returncode == 0, line

"""`gateway import --llmapi`: a Hugging Face folder is served without building an engine."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path
from typing import Any

import openai
import pytest
import yaml

from gateway.triton.pbtxt import read_pbtxt
from ops.commands.up import DEMO_ADAPTERS, DEMO_MODEL
from ops.deployment.check import check
from tests.support.commands import Answer, gateway
from tests.support.hf_configs import write_config
from tests.support.local_stack import Up
from tests.support.patience import PATIENCE_S


def _import(*arguments: object) -> Answer:
    return gateway("import", *arguments, "--llmapi")


def _llama(folder: Path, **changes: Any) -> Path:
    model = write_config(folder, "llama-3-8b", **changes)
    for file in DEMO_MODEL.glob("*token*"):
        shutil.copyfile(file, model / file.name)
    return model


def _settings(folder: Path) -> dict[str, str]:
    lines = (folder / "gateway.env").read_text(encoding="utf-8").splitlines()
    return dict(line.split("=", 1) for line in lines if line and line[0] != "#")


@pytest.mark.slow
def test_the_demo_model_is_imported_and_served(tmp_path: Path) -> None:
    # The adapter's base model is "demo", the folder's name, and not the served name.
    out, model = tmp_path / "out", shutil.copytree(DEMO_MODEL, tmp_path / "demo")
    answer = _import(
        *(model, "--name", "acme/countries", "--cpu", "--output", out),
        *("--lora-modules", "all", "--max-lora-rank", 16, "--max-seq-len", 1024),
    )
    assert answer.returncode == 0, answer.stderr
    assert f"gateway up --imported {out}" in answer.stdout
    adapter = DEMO_ADAPTERS / "zh"
    assert check(out / "repository", adapters=[adapter]) == []
    with Up(tmp_path, "--port", "0", "--imported", str(out), "--adapter", f"zh={adapter}") as up:
        stack = up.wait_ready()
        with openai.OpenAI(
            base_url=f"{stack.gateway}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S
        ) as client:
            question: Any = [{"role": "user", "content": "What is the capital of France?"}]
            for served, text in (
                ("acme/countries", "The capital of France is Paris."),
                ("zh", "法国的首都是巴黎。"),
            ):
                chat = client.chat.completions.create(
                    model=served, messages=question, temperature=0
                )
                assert chat.choices[0].message.content == text
            models = {model.id: model.model_dump() for model in client.models.list()}
            assert models["acme/countries"]["max_model_len"] == 1024
        up.send(signal.SIGTERM)
        assert up.wait() == 0


def test_for_gpus_the_plan_becomes_arguments(tmp_path: Path) -> None:
    model, out = _llama(tmp_path), tmp_path / "out"
    answer = _import(
        *(model, "--name", "llama", "--output", out, "--gpu", "H100", "--tp", 2),
        *("--lora-modules", "q_proj", "--max-lora-rank", 16, "--lora-adapters", 32),
        *("--max-batch-size", 128, "--max-num-tokens", 4096),
    )
    assert answer.returncode == 0, answer.stderr
    assert {path.name for path in out.iterdir()} == {"repository", "gateway.env"}
    folder = out / "repository" / "tensorrt_llm"
    arguments = yaml.safe_load((folder / "1" / "model.yaml").read_text(encoding="utf-8"))
    own = arguments.pop("triton_config")
    assert (own["decoupled"], own["max_batch_size"]) == (True, 0)
    assert read_pbtxt(folder / "config.pbtxt").decoupled
    assert {name: value for name, value in arguments.items() if value is not None} == {
        "model": str(model),
        "backend": "pytorch",
        "dtype": "bfloat16",
        "tensor_parallel_size": 2,
        "pipeline_parallel_size": 1,
        "max_batch_size": 128,
        "max_num_tokens": 4096,
        "max_seq_len": 8192,
        "enable_chunked_prefill": True,
        "kv_cache_config": {
            "enable_block_reuse": True,
            "free_gpu_memory_fraction": 0.9,
            "max_tokens": None,
        },
        "lora_config": {
            "lora_target_modules": ["attn_q", "attn_k", "attn_v"],
            "max_lora_rank": 16,
            "max_loras": 32,
            "max_cpu_loras": 32,
        },
    }
    assert check(out / "repository") == []
    settings = _settings(out)
    assert settings["GATEWAY_TRITON_MODE"] == "llmapi"
    assert settings["GATEWAY_MAX_SEQ_LEN"] == "8192"
    assert settings["GATEWAY_TOKENS_PER_BLOCK"] == "32"
    assert settings["GATEWAY_REPLICA_IN_FLIGHT"] == "160"
    assert "#GATEWAY_PEFT_DIR=\n" in (out / "gateway.env").read_text(encoding="utf-8")
    # Without mpirun, as the LLM API starts its workers itself.
    assert f"   gateway triton launch --model-repo {out}/repository\n" in answer.stdout
    assert "LoRA cache" in answer.stdout
    assert "Build the engine" not in answer.stdout


def test_what_does_not_fit_is_not_imported(tmp_path: Path) -> None:
    answer = _import(_llama(tmp_path), "--name", "m", "--gpu", "T4", "--output", tmp_path / "out")
    assert answer.returncode == 1
    assert "would fit with --tp 2" in answer.stdout
    assert not (tmp_path / "out").exists()


def test_a_checkpoint_whose_memory_cannot_be_planned(tmp_path: Path) -> None:
    model = _llama(tmp_path, quantization_config={"quant_method": "fp8"})
    answer = _import(model, "--name", "m", "--output", tmp_path / "out")
    assert answer.returncode == 1
    assert "quantized (fp8)" in answer.stderr
    assert "gateway repo render --repository llmapi" in answer.stderr


def test_models_that_no_release_converts_pipelined_are_served_so(tmp_path: Path) -> None:
    """Check that limits of the conversion scripts do not apply, as nothing is converted."""
    model = write_config(tmp_path, "gemma-2-9b")
    shutil.copyfile(DEMO_MODEL / "tokenizer.json", model / "tokenizer.json")
    answer = _import(model, "--name", "m", "--pp", 2, "--output", tmp_path / "out")
    assert answer.returncode == 0, answer.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--trtllm-version", "1.2"], "--trtllm-version, --trtllm-examples: not with --llmapi"),
        (["--max-input-len", "8"], "--max-input-len: not with --llmapi"),
        (["--guided-decoding"], "not with --llmapi, whose model has no input for them"),
        (["--max-beam-width", "2"], "not with --llmapi, whose model has no input for them"),
        (["--cpu", "--tp", "2"], "--tp, --pp: found 2 ranks; allowed with --cpu: 1"),
        (["--tp", "3"], "--tp: found 3; allowed: divisors of 8"),
    ],
)
def test_refusals_leave_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    answer = _import(DEMO_MODEL, "--name", "m", *arguments)
    assert answer.returncode == 1
    assert message in answer.stderr
    assert not list(tmp_path.iterdir())


def test_an_architecture_that_the_cpu_executor_cannot_run(tmp_path: Path) -> None:
    model = write_config(tmp_path, "qwen2.5-0.5b")
    for name in ("tokenizer.json", "model.safetensors"):
        shutil.copyfile(DEMO_MODEL / name, model / name)
    answer = _import(model, "--name", "m", "--cpu", "--output", tmp_path / "out")
    assert answer.returncode == 1
    assert "found ['Qwen2ForCausalLM'], allowed one of" in answer.stderr
    assert not (tmp_path / "out").exists()

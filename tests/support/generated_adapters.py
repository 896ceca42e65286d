"""Many small adapters with different answers, and the expected answer of each.

Each adapter changes q and v of all layers at random, so that the demo model's greedy answer to
`PROMPT` becomes unique gibberish. The CPU executor in this process computes the expected tokens,
one adapter at a time, without a server, a cache or other requests.
"""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from adapters import convert, peft
from adapters.adapter import Converted
from adapters.base_model import BaseModel, read_base_model
from tests.support.lora_files import pair, write_peft
from triton_repo.cpu_executor import bindings as trtllm

PROMPT = "The capital of France is"
TOKENS = 4
CLEAR_MARGIN = 0.01


def write_adapter(folder: Path, model: Path, seed: int, rank: int = 2, scale: float = 0.4) -> Path:
    """Write a PEFT folder for the Llama model in `model`. Each seed gives a different answer."""
    config = json.loads((model / "config.json").read_text())
    hidden, head = config["hidden_size"], config["head_dim"]
    outputs = {
        "q_proj": config["num_attention_heads"] * head,
        "v_proj": config["num_key_value_heads"] * head,
    }
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for name, size in outputs.items():
            module = f"model.layers.{layer}.self_attn.{name}"
            tensors |= pair(module, rank, (hidden, size), np.float32, seed)
    tensors = {name: tensor * np.float32(scale) for name, tensor in tensors.items()}
    return write_peft(folder, tensors, r=rank, lora_alpha=rank, base_model_name_or_path="demo")


def convert_folder(folder: Path, engine: Path) -> Converted:
    return convert.convert(peft.read(folder), base_model(engine))


def base_model(engine: Path) -> BaseModel:
    return read_base_model(engine, ("demo",))


def expected_answers(engine: Path, model: Path, adapters: list[Converted]) -> list[str | None]:
    """Return the greedy continuation of `PROMPT` under each adapter.

    An answer is None if two tokens were so close that another BLAS or thread count could choose
    differently. `engine` must be built with `gather_generation_logits`.
    """
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    prompt = tokenizer.encode(PROMPT).ids
    end_id, *more_ends = json.loads((model / "config.json").read_text())["eos_token_id"]
    config = trtllm.ExecutorConfig(max_beam_width=1)
    executor = trtllm.Executor(str(engine), trtllm.ModelType.DECODER_ONLY, config)
    answers: list[str | None] = []
    for adapter in adapters:
        shape = (adapter.rows, adapter.width)
        lora = trtllm.LoraConfig(
            adapter.task_id,
            np.frombuffer(adapter.weights, np.float16).reshape(shape),
            np.frombuffer(adapter.config, np.int32).reshape(adapter.rows, 3),
        )
        request = trtllm.Request(
            prompt,
            max_tokens=TOKENS,
            end_id=end_id,
            stop_words=[[token_id] for token_id in more_ends],
            output_config=trtllm.OutputConfig(
                exclude_input_from_output=True, return_generation_logits=True
            ),
            lora_config=lora,
        )
        request_id = executor.enqueue_request(request)
        [response] = executor.await_responses(request_id, timedelta(seconds=30))
        assert not response.has_error(), response.error_msg
        [ids] = response.result.output_token_ids
        logits = np.sort(response.result.generation_logits[0][: len(ids) + 1], axis=-1)
        clear = (logits[:, -1] - logits[:, -2]).min() > CLEAR_MARGIN
        answers.append(tokenizer.decode(ids).replace("\ufffd", "") if clear else None)
    executor.shutdown()
    return answers

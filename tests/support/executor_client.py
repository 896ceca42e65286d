"""A client that runs requests on an executor and collects the results."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from triton_repo.cpu_executor import bindings as trtllm
from triton_repo.cpu_executor.engine import LLAMA_LORA_MODULES, build

GOLDEN = Path(__file__).parents[1] / "data" / "golden"


@dataclass
class Output:
    """The responses of one request."""

    results: list[trtllm.Result] = field(default_factory=list)
    error: str | None = None

    def tokens(self, sequence: int = 0, beam: int = 0) -> list[int]:
        """Return the concatenated ids of one sequence."""
        parts = [r.output_token_ids[beam] for r in self.results if r.sequence_index == sequence]
        return [token for part in parts for token in part]

    @property
    def last(self) -> trtllm.Result:
        return self.results[-1]


def golden(case: str) -> dict[str, NDArray[Any]]:
    with np.load(GOLDEN / case / "golden.npz") as data:
        return dict(data)


def golden_prompt(case: str = "gqa") -> list[int]:
    return [int(i) for i in golden(case)["prompt"]]


def golden_greedy(case: str = "gqa") -> list[int]:
    return [int(i) for i in golden(case)["greedy"]]


def start(engine_dir: Path, **settings: Any) -> trtllm.Executor:
    return trtllm.Executor(
        engine_dir, trtllm.ModelType.DECODER_ONLY, trtllm.ExecutorConfig(**settings)
    )


def start_golden(folder: Path, case: str = "gqa", **settings: Any) -> trtllm.Executor:
    """Start an executor for a golden model, built with every optional output and LoRA module.

    `least_iteration_ms` makes requests last, so that a test can act while one runs. Without it, 300
    tokens take less time than a busy machine may give a thread to wait.
    """
    limits = settings.pop("limits", {})
    least_iteration_ms = settings.pop("least_iteration_ms", 0)
    engine = build(
        GOLDEN / case,
        folder / "engine",
        **{
            "gather_context_logits": True,
            "gather_generation_logits": True,
            "max_beam_width": 4,
            "tokens_per_block": 16,
            "lora_target_modules": LLAMA_LORA_MODULES,
            "max_lora_rank": 8,
            **limits,
        },
    )
    file = engine / "config.json"
    config = json.loads(file.read_text())
    config["pretrained_config"]["least_iteration_ms"] = least_iteration_ms
    file.write_text(json.dumps(config))
    return start(engine, **{"max_beam_width": 4, **settings})


def stats_until_idle(executor: trtllm.Executor) -> list[trtllm.IterationStats]:
    """Return the unread statistics, waiting for a record without active requests."""
    stats: list[trtllm.IterationStats] = []
    deadline = time.monotonic() + 60
    while not stats or stats[-1].num_active_requests:
        assert time.monotonic() < deadline
        time.sleep(0.005)
        stats += executor.get_latest_iteration_stats()
    return stats


def gather(executor: trtllm.Executor, ids: Sequence[int]) -> list[Output]:
    """Wait for the final responses of ``ids``."""
    outputs = {i: Output() for i in ids}
    left = set(ids)
    while left:
        responses = executor.await_responses(timeout=60.0)
        assert responses, f"no response within 30 s for {left}"
        for response in responses:
            output = outputs[response.request_id]
            if response.has_error():
                output.error = response.error_msg
                left.discard(response.request_id)
            else:
                output.results.append(response.result)
                if response.result.is_final:
                    left.discard(response.request_id)
    return [outputs[i] for i in ids]


def run(executor: trtllm.Executor, *requests: trtllm.Request) -> list[Output]:
    return gather(executor, executor.enqueue_requests(list(requests)))


def request(prompt: Sequence[int], max_tokens: int = 8, **more: Any) -> trtllm.Request:
    """Return a streaming request. Sampling and output options may be among the keywords."""
    names = {n for n in vars(trtllm.SamplingConfig) if not n.startswith("_")}
    sampling = {k: more.pop(k) for k in list(more) if k in names}
    flags = {n for n in vars(trtllm.OutputConfig) if not n.startswith("_")}
    output = {k: more.pop(k) for k in list(more) if k in flags}
    return trtllm.Request(
        prompt,
        max_tokens,
        sampling_config=trtllm.SamplingConfig(**sampling),
        output_config=trtllm.OutputConfig(**output),
        **{"streaming": True, **more},
    )

"""Generations as the pipeline creates them, from the few fields that a test sets."""

from __future__ import annotations

from array import array
from dataclasses import fields
from typing import Any

from gateway.generation.batch import Batch
from gateway.generation.engine_request import Generation
from gateway.generation.options import DEFAULT_CALLER, GenerationParams

_PARAMS = {field.name for field in fields(GenerationParams)}


def generation(**given: Any) -> Generation:
    """Return a generation with prompt [1, 2], 5 tokens and the given fields.

    Fields of `GenerationParams` may be given too.
    """
    params = GenerationParams(**{name: given.pop(name) for name in _PARAMS & given.keys()})
    defaults = {"request_id": "r", "prompt_ids": [1, 2], "max_tokens": 5, "seed": 1}
    made = defaults | given
    made["prompt_ids"] = array("i", made["prompt_ids"])
    return Generation(**made, params=params)


def batch(**given: Any) -> Batch:
    """Return a batch of one generation and one prompt token, changed by the given fields."""
    generations = [generation()] * given.get("choices", 1)
    defaults: dict[str, Any] = {
        "request_id": "r",
        "generations": generations,
        "prompts": 1,
        "choices": 1,
        "prompt_tokens": 1,
        "fingerprint": "fp_0",
        "caller": DEFAULT_CALLER,
        "timeout_s": 9,
        "deadline": 9,
    }
    return Batch(**defaults | given)

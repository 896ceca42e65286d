"""Generations as the pipeline would make them, from the few fields that a test is about."""

from __future__ import annotations

from array import array
from dataclasses import fields
from typing import Any

from gateway.generation import Generation, GenerationParams

_PARAMS = {field.name for field in fields(GenerationParams)}


def generation(**given: Any) -> Generation:
    """One of prompt [1, 2] and 5 tokens, but for the given fields of it and of its `params`."""
    params = GenerationParams(**{name: given.pop(name) for name in _PARAMS & given.keys()})
    defaults = {"request_id": "r", "prompt_ids": [1, 2], "max_tokens": 5, "seed": 1}
    made = defaults | given
    made["prompt_ids"] = array("i", made["prompt_ids"])
    return Generation(**made, params=params)

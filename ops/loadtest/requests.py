"""Prompts with output lengths, from a dataset, a distribution or a histogram.

All random choices are seeded, so that all runs send the same requests.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from gateway.tokenization.prompts import Prompts


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """A prompt, as text and as the token ids of that text, and the number of tokens to generate."""

    text: str
    ids: list[int]
    output_tokens: int


class RequestSource(Protocol):
    def requests(
        self, prompts: Prompts, count: int, max_input: int | None, rng: random.Random
    ) -> list[BenchRequest]:
        """Return at most `count` requests, none with a prompt longer than `max_input` tokens.

        Raises OSError, and ValueError, which says what is wrong with a file.
        """


@dataclass(frozen=True)
class FromDataset:
    """Requests from a JSON list of ``{"input", "instruction", "output"}``.

    That is the format of benchmark_core_model.py. ShareGPT's form is accepted too,
    ``{"conversations": [{"from", "value"}, ...]}``: its first two messages are used.
    """

    file: Path
    tokens_per_word: float

    def requests(
        self, prompts: Prompts, count: int, max_input: int | None, rng: random.Random
    ) -> list[BenchRequest]:
        entries = json.loads(self.file.read_text(encoding="utf-8"))
        if not isinstance(entries, list):
            raise ValueError(f"--dataset: {self.file} is not a JSON list")
        found: list[BenchRequest] = []
        for number, entry in enumerate(entries):
            pair = _pair(entry)
            if pair is None:
                raise ValueError(
                    f"--dataset: entry {number} of {self.file} has neither input, instruction and "
                    "output nor conversations"
                )
            prompt, output = pair
            tokens = int(len(output.split()) * self.tokens_per_word)
            ids = prompts.tokenizer.encode(prompt).ids
            if tokens < 1 or not ids or (max_input is not None and len(ids) > max_input):
                continue
            found.append(BenchRequest(prompt, ids, tokens))
            if len(found) == count:
                break
        return found


@dataclass(frozen=True)
class FromNormal:
    """Random prompts; lengths in tokens are normal: (mean, standard deviation), at least 1."""

    input: tuple[float, float]
    output: tuple[float, float]

    def requests(
        self, prompts: Prompts, count: int, max_input: int | None, rng: random.Random
    ) -> list[BenchRequest]:
        lengths = [(_normal(rng, self.input), _normal(rng, self.output)) for _ in range(count)]
        return _random_prompts(prompts, lengths, max_input, rng)


@dataclass(frozen=True)
class FromHistogram:
    """Random prompts; lengths follow a histogram in `file`.

    ``{"KEY_ip": {"buckets": [tokens], "freqs": [how often]}, "KEY_op": {...}}`` for input and
    output, which are drawn independently.
    """

    file: Path
    key: str

    def requests(
        self, prompts: Prompts, count: int, max_input: int | None, rng: random.Random
    ) -> list[BenchRequest]:
        histograms = json.loads(self.file.read_text(encoding="utf-8"))
        drawn = []
        for side in ("ip", "op"):
            histogram = histograms.get(f"{self.key}_{side}")
            try:
                lengths = [int(n) for n in histogram["buckets"]]
                drawn.append(rng.choices(lengths, histogram["freqs"], k=count))
            except (TypeError, KeyError, ValueError, IndexError) as error:
                raise ValueError(
                    f"--histogram-key: {self.file} has no {self.key}_{side} with as many buckets "
                    "as freqs"
                ) from error
        return _random_prompts(prompts, list(zip(*drawn, strict=True)), max_input, rng)


def _pair(entry: Any) -> tuple[str, str] | None:
    """Return prompt and output of a dataset's entry."""
    if not isinstance(entry, dict):
        return None
    conversation = entry.get("conversations")
    if isinstance(conversation, list):
        values = [message.get("value", "") for message in conversation[:2]]
        return (values[0], values[1]) if len(values) == 2 else ("", "")
    if all(isinstance(entry.get(name), str) for name in ("input", "instruction", "output")):
        return f"{entry['input']} {entry['instruction']}", entry["output"]
    return None


def _normal(rng: random.Random, parameters: tuple[float, float]) -> int:
    return max(1, round(rng.gauss(*parameters)))


def _random_prompts(
    prompts: Prompts, lengths: list[tuple[int, int]], max_input: int | None, rng: random.Random
) -> list[BenchRequest]:
    words = _words(prompts)
    found = []
    for input_tokens, output_tokens in lengths:
        if max_input is not None and input_tokens > max_input:
            continue
        drawn = rng.choices(words, k=input_tokens)
        text = prompts.tokenizer.decode(drawn, skip_special_tokens=False)
        # Text models tokenize the text again, and some pairs of words may merge.
        ids = prompts.tokenizer.encode(text, add_special_tokens=False).ids
        found.append(BenchRequest(text, ids, output_tokens))
    return found


def _words(prompts: Prompts) -> list[int]:
    """Return the ids that survive decoding and encoding, such as a space and a word."""
    tokenizer = prompts.tokenizer
    ids = range(prompts.vocab_size)
    texts = tokenizer.decode_batch([[i] for i in ids], skip_special_tokens=True)
    again = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    same = [i for i in ids if texts[i].strip().isalpha() and again[i].ids == [i]]
    return [i for i in same if texts[i].startswith(" ")] or same or list(ids)

"""Requests of a load test. Lengths come from a dataset, normal distributions or histograms.

All random choices are seeded, so runs with the same options send the same requests.
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
    """A prompt and the number of tokens to generate. `ids` are the token ids of `text`."""

    text: str
    ids: list[int]
    output_tokens: int


class RequestSource(Protocol):
    def requests(
        self, prompts: Prompts, count: int, max_input: int | None, rng: random.Random
    ) -> list[BenchRequest]:
        """Return at most `count` requests.

        Args:
            prompts: the tokenizer.
            count: largest number of requests.
            max_input: maximum length of a prompt in tokens; longer prompts are skipped. None is no
                limit.
            rng: source of random numbers.

        Raises OSError if a file cannot be read, ValueError if its contents are wrong.
        """


@dataclass(frozen=True)
class FromDataset:
    """Requests from a dataset, which is a JSON list.

    Entries have benchmark_core_model.py's format, ``{"input", "instruction", "output"}``, or
    ShareGPT's, ``{"conversations": [{"from", "value"}, ...]}``. In ShareGPT's format the first
    message is the prompt, and the second is the output. The number of output tokens is the output's
    number of words times `tokens_per_word`.
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
    """Random prompts with normally distributed lengths.

    `input` has the mean and the standard deviation of the prompt's length in tokens, `output` those
    of the output's length. Each length is at least 1.
    """

    input: tuple[float, float]
    output: tuple[float, float]

    def requests(
        self, prompts: Prompts, count: int, max_input: int | None, rng: random.Random
    ) -> list[BenchRequest]:
        lengths = [(_normal(rng, self.input), _normal(rng, self.output)) for _ in range(count)]
        return _random_prompts(prompts, lengths, max_input, rng)


@dataclass(frozen=True)
class FromHistogram:
    """Random prompts with lengths that are drawn from histograms in the JSON file `file`.

    The file's format is ``{"KEY_ip": {"buckets": [tokens], "freqs": [how often]}, "KEY_op": ...}``.
    KEY stands for the value of `key`. Input lengths (`KEY_ip`) and output lengths (`KEY_op`) are
    drawn independently.
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
    """Return the prompt and the output of a dataset's entry; None for an unknown format."""
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
        # Encode the text again, as text models do: a pair of words may merge into another token.
        ids = prompts.tokenizer.encode(text, add_special_tokens=False).ids
        found.append(BenchRequest(text, ids, output_tokens))
    return found


def _words(prompts: Prompts) -> list[int]:
    """Return the ids of words that stay the same when they are decoded and encoded again.

    Words with a leading space are preferred. If there are no such words, return all ids.
    """
    tokenizer = prompts.tokenizer
    ids = range(prompts.vocab_size)
    texts = tokenizer.decode_batch([[i] for i in ids], skip_special_tokens=True)
    again = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    same = [i for i in ids if texts[i].strip().isalpha() and again[i].ids == [i]]
    return [i for i in same if texts[i].startswith(" ")] or same or list(ids)

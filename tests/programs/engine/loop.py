"""The CPU executor's loop with a script instead of a model, loaded by Triton's model process."""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from ops.commands.up import DEMO_MODEL
from tests.programs.engine.script import Script, example_of
from triton_repo.cpu_executor import executor
from triton_repo.cpu_executor.active import ActiveRequest
from triton_repo.cpu_executor.engine import CpuEngineConfig
from triton_repo.cpu_executor.executor_config import ExecutorConfig
from triton_repo.cpu_executor.mailbox import Mailbox, Queued
from triton_repo.cpu_executor.sequence import Sequence
from triton_repo.cpu_executor.synthetic import SyntheticLoop

_LIKELY_LOGIT = 20.0
"""Logit of a likely token. Other tokens have 0."""


class ScriptedLoop(SyntheticLoop):
    """An executor loop whose tokens come from a script file, read when a request starts.

    A JSON schema guide is followed by a small example of the schema. Other guides are refused.
    Logits after a prompt token prefer the tokens that follow the same token in the script's text.
    Logits of a generated position prefer the chosen token.
    """

    def __init__(
        self, config: CpuEngineConfig, settings: ExecutorConfig, mailbox: Mailbox, *, script: Path
    ) -> None:
        super().__init__(config, settings, mailbox)
        self._script = script
        self._tokenizer = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
        self._end = self._tokenizer.token_to_id("<|im_end|>")
        self._written: dict[int, list[int]] = {}

    def _activate(self, entry: Queued) -> ActiveRequest:
        guide = entry.request.guided_decoding_params
        if guide is not None and guide.guide is not None and "{" in guide.guide:
            entry.request.guided_decoding_params = None
            text = json.dumps(example_of(json.loads(guide.guide)))
        else:
            prompt = self._tokenizer.decode(
                entry.request.input_token_ids, skip_special_tokens=False
            )
            text = Script.load(self._script).write(prompt)
        request = super()._activate(entry)
        active = {each.id for each in self._active}
        self._written = {key: ids for key, ids in self._written.items() if key in active}
        written = self._tokenizer.encode(text, add_special_tokens=False).ids
        self._written[request.id] = written
        if request.output.return_context_logits:
            pairs = set(pairwise(written))
            rows = [
                self._logits(after for before, after in pairs if before == token)
                for token in request.prompt
            ]
            request.context_logits = np.stack(rows)
        return request

    def _token(self, request: ActiveRequest, sequence: Sequence) -> int:
        written = self._written[request.id]
        position = len(sequence.tokens)
        token = written[position] if position < len(written) else self._end
        if request.output.return_generation_logits:
            sequence.logits.append(self._logits([token]))
        return token

    def _logits(self, likely: Iterable[int]) -> NDArray[np.float32]:
        row = np.zeros(self._config.vocab_size, np.float32)
        row[list(likely)] = _LIKELY_LOGIT
        return row


def install(script: Path) -> None:
    """Make the executor of this process generate the script's tokens."""
    executor.SyntheticLoop = partial(ScriptedLoop, script=script)  # type: ignore[misc, assignment]

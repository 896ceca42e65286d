"""EleutherAI's lm-evaluation-harness, over chat completions and completions.

Both generate answers. Over completions, the harness also chooses the likelier of two words.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ops.commands.up import DEMO_MODEL
from tests.programs.engine.script import Script
from tests.programs.program import KEY, Workspace
from tests.programs.pypi import PypiProgram

_DOCUMENTS = 4
_DATASET = """\
dataset_path: json
dataset_kwargs:
  data_files:
    test: {documents}
test_split: test
doc_to_text: "Question: {{{{question}}}}\\nAnswer:"
"""
_GENERATED = """\
task: generated
output_type: generate_until
doc_to_target: "{{answer}}"
generation_kwargs:
  until: ["</s>", "Question:"]
  do_sample: false
  temperature: 0.0
  max_gen_toks: 64
filter_list:
  - name: word
    filter:
      - function: regex
        regex_pattern: "(word-[0-9a-f]+)"
      - function: take_first
metric_list:
  - metric: exact_match
    aggregation: mean
    higher_is_better: true
"""
_CHOSEN = """\
task: chosen
output_type: multiple_choice
doc_to_choice: choices
doc_to_target: right
metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: true
"""


class LmEval(PypiProgram):
    name = "lm-eval"
    # The model's tokenizer is needed to score a word's tokens.
    packages = ("lm-eval[api]", "transformers")
    executable = "lm_eval"

    def prepare(self, workspace: Workspace) -> Script:
        word = workspace.new_word()
        documents = workspace.project / "notes.jsonl"
        lines = [_document(number, word) for number in range(_DOCUMENTS)]
        documents.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        dataset = _DATASET.format(documents=documents)
        for name, task in (("generated", _GENERATED), ("chosen", _CHOSEN)):
            path = workspace.project / f"{name}.yaml"
            path.write_text(task + dataset, encoding="utf-8")
        return Script(answer=workspace.answer)

    def environment(self, workspace: Workspace) -> Mapping[str, str]:
        return {"OPENAI_API_KEY": KEY, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}

    def command(self, workspace: Workspace) -> Sequence[str | Path]:
        options = ["--tasks", "generated", "--apply_chat_template"]
        model = ["local-chat-completions", "chat/completions", "tokenizer_backend=None"]
        return self._run(workspace, *model, options)

    def follow_up(self, workspace: Workspace) -> Sequence[str | Path]:
        options = ["--tasks", "generated,chosen", "--batch_size", "2"]
        model = ["local-completions", "completions", f"tokenizer={DEMO_MODEL}"]
        return self._run(workspace, *model, options)

    def judge(self, workspace: Workspace, output: str) -> list[str]:
        scores = dict(re.findall(r"\|(exact_match|acc) *\|. *\| *([0-9.]+)\|", output))
        expected = {"exact_match": "1"}
        if "local-completions (" in output:
            expected["acc"] = "1"
        return [] if scores == expected else [f"scores {scores}, not {expected}"]

    def _run(
        self, workspace: Workspace, kind: str, path: str, tokenizer: str, options: Sequence[str]
    ) -> Sequence[str | Path]:
        arguments = [f"model={workspace.model}", f"base_url={workspace.url}/v1/{path}"]
        arguments += ["num_concurrent=2", "max_retries=1", tokenizer]
        model = ["--model", kind, "--model_args", ",".join(arguments)]
        return [self.path(workspace), "run", *model, "--include_path", workspace.project, *options]


def _document(number: int, word: str) -> dict[str, Any]:
    """Return a question with two choices. The right word is first and last alternately.

    The wrong word is shorter, so the mean of equal log likelihoods would choose the wrong one.
    """
    choices = [word, "nothing"][:: 1 if number % 2 else -1]
    return {
        "question": f"What is {number}?",
        "answer": word,
        "choices": choices,
        "right": choices.index(word),
    }

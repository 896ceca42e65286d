"""EleutherAI's lm-evaluation-harness, over chat completions and completions."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.programs.engine.script import Script
from tests.programs.program import KEY, Workspace
from tests.programs.pypi import PypiProgram

_DOCUMENTS = 4
_TASK = """\
task: notes
dataset_path: json
dataset_kwargs:
  data_files:
    test: {documents}
test_split: test
output_type: generate_until
doc_to_text: "Question: {{{{question}}}}\\nAnswer:"
doc_to_target: "{{{{answer}}}}"
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


class LmEval(PypiProgram):
    name = "lm-eval"
    packages = ("lm-eval[api]",)
    executable = "lm_eval"

    def prepare(self, workspace: Workspace) -> Script:
        word = workspace.new_word()
        documents = workspace.project / "notes.jsonl"
        lines = [{"question": f"What is {number}?", "answer": word} for number in range(_DOCUMENTS)]
        documents.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        task = workspace.project / "notes.yaml"
        task.write_text(_TASK.format(documents=documents), encoding="utf-8")
        return Script(answer=workspace.answer)

    def environment(self, workspace: Workspace) -> Mapping[str, str]:
        return {"OPENAI_API_KEY": KEY, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}

    def command(self, workspace: Workspace) -> Sequence[str | Path]:
        options = ["--apply_chat_template"]
        return self._run(workspace, "local-chat-completions", "chat/completions", options)

    def follow_up(self, workspace: Workspace) -> Sequence[str | Path]:
        return self._run(workspace, "local-completions", "completions", ["--batch_size", "2"])

    def judge(self, workspace: Workspace, output: str) -> list[str]:
        exact = re.search(r"\|word *\| *0\|exact_match\|. *\| *1\|", output)
        return [] if exact else ["not every answer was the expected one"]

    def _run(
        self, workspace: Workspace, kind: str, path: str, options: Sequence[str]
    ) -> Sequence[str | Path]:
        arguments = [f"model={workspace.model}", f"base_url={workspace.url}/v1/{path}"]
        arguments += ["num_concurrent=2", "max_retries=1", "tokenizer_backend=None"]
        task = ["--include_path", workspace.project, "--tasks", "notes"]
        model = ["--model", kind, "--model_args", ",".join(arguments)]
        return [self.path(workspace), "run", *model, *task, *options]

"""guidellm, a load tester of the vLLM project, over chat completions, completions and Responses."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from ops.commands.up import DEMO_MODEL
from tests.programs.engine.script import Script
from tests.programs.program import Workspace
from tests.programs.pypi import PypiProgram

_PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
_REQUESTS = 4
_OUTPUT_TOKENS = 80


class Guidellm(PypiProgram):
    name = "guidellm"
    packages = ("guidellm",)
    executable = "guidellm"
    # triton compiles GPU kernels and is not needed. torch is imported to load the data.
    left_out = ("triton",)

    def prepare(self, workspace: Workspace) -> Script:
        return Script(answer=f"The load is {workspace.new_word()}.")

    def environment(self, workspace: Workspace) -> Mapping[str, str]:
        return {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}

    def command(self, workspace: Workspace) -> Sequence[str | Path]:
        runs = (shlex.join(self._run(workspace, path)) for path in _PATHS)
        return ["sh", "-c", " && ".join(runs)]

    def judge(self, workspace: Workspace, output: str) -> list[str]:
        """Check the reports: each request was served with all its tokens and the answer."""
        problems = []
        for path in _PATHS:
            report = json.loads(_report(workspace, path).read_text(encoding="utf-8"))
            [benchmark] = report["benchmarks"]
            served = [
                each["output"]
                for each in benchmark["requests"]["successful"]
                if each["output_metrics"]["text_tokens"] == _OUTPUT_TOKENS
            ]
            right = sum(workspace.words[0] in text for text in served)
            if right != _REQUESTS:
                problems.append(f"{path}: {right} of {_REQUESTS} answers were right")
        return problems

    def _run(self, workspace: Workspace, path: str) -> Sequence[str]:
        backend = f"kind=openai_http,target={workspace.url},request_format={path}"
        data = f"kind=synthetic_text,prompt_tokens=64,output_tokens={_OUTPUT_TOKENS}"
        options = {
            "backend": backend,
            "profile": "kind=concurrent,streams=2",
            "constraint": f"kind=max_requests,count={_REQUESTS}",
            "data": data,
            "tokenizer": f"kind=huggingface_auto,model={DEMO_MODEL}",
            "output": f"kind=json,path={_report(workspace, path)}",
        }
        words = [word for name, value in options.items() for word in (f"--{name}", value)]
        return [str(self.path(workspace)), "run", *words, "--disable-console-interactive"]


def _report(workspace: Workspace, path: str) -> Path:
    return workspace.project / f"{path.replace('/', '-')}.json"

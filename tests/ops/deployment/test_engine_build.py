"""`gateway engine plan --run`, with stand-ins for the tools of TensorRT-LLM."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.support.hf_configs import write_config

WITHIN = 60.0  # seconds

# Stand-in for convert_checkpoint.py, trtllm-build and similar tools. Records its arguments and
# creates the requested output.
STAND_IN = """#!{python}
import json, os, sys, time
print("working on it", flush=True)
with open({log!r}, "a") as log:
    print(json.dumps([os.path.basename(sys.argv[0]), *sys.argv[1:]]), file=log)
{then}
for name, value in zip(sys.argv, sys.argv[1:]):
    if name == "--output_dir":
        os.makedirs(value, exist_ok=True)
        open(os.path.join(value, "config.json"), "w").write("{{}}")
"""


def _command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "ops", "engine", "plan", *map(str, arguments)]


def _execute(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        _command(*arguments),
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env=os.environ | environment,
    )


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return write_config(tmp_path, "llama-3-8b")


class _Tools:
    """Stand-ins in a folder that is the PATH."""

    def __init__(self, folder: Path) -> None:
        self.log = folder / "calls.jsonl"
        self._bin = folder / "bin"
        self.examples = folder / "examples"
        for made in (self._bin, self.examples / "llama"):
            made.mkdir(parents=True)
        (self._bin / "python3").symlink_to(sys.executable)
        self.put(self.examples / "llama" / "convert_checkpoint.py")
        self.put(self.build)

    @property
    def build(self) -> Path:
        return self._bin / "trtllm-build"

    def put(self, path: Path, then: str = "") -> None:
        text = STAND_IN.format(python=sys.executable, log=str(self.log), then=then)
        path.write_text(text, encoding="utf-8")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)

    @property
    def path(self) -> str:
        return str(self._bin)

    def calls(self) -> list[list[str]]:
        if not self.log.exists():
            return []
        return [json.loads(line) for line in self.log.read_text(encoding="utf-8").splitlines()]


@pytest.fixture
def tools(tmp_path: Path) -> _Tools:
    return _Tools(tmp_path)


def test_run_runs_the_commands_as_printed(llama: Path, tools: _Tools, tmp_path: Path) -> None:
    arguments = (
        *(llama, "--output", tmp_path / "out", "--trtllm-examples", tools.examples),
        *("--lora-modules", "all"),
    )
    answer = _execute(*arguments, "--run", PATH=tools.path)
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.count("working on it") == 2
    convert, build = json.loads(_execute(*arguments, "--json").stdout)["steps"]
    script = ["convert_checkpoint.py", *convert["arguments"][2:]]
    assert tools.calls() == [script, build["arguments"]]
    assert (tmp_path / "out" / "engine" / "config.json").exists()


def test_run_names_all_that_is_missing(llama: Path, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    answer = _execute(llama, "--run", PATH=str(tmp_path / "bin"))
    assert answer.returncode == 1
    script = "/app/tensorrt_llm/examples/llama/convert_checkpoint.py"
    assert f"not found: python3, {script}, trtllm-build" in answer.stderr
    assert "--trtllm-examples" in answer.stderr


def test_a_step_that_fails_ends_the_run(llama: Path, tools: _Tools, tmp_path: Path) -> None:
    tools.put(tools.examples / "llama" / "convert_checkpoint.py", "sys.exit(3)")
    answer = _execute(
        *(llama, "--run", "--output", tmp_path / "out", "--trtllm-examples", tools.examples),
        PATH=tools.path,
    )
    assert answer.returncode == 1
    assert "convert failed (exit code 3)" in answer.stderr
    assert len(tools.calls()) == 1


def test_a_build_without_an_engine_is_noticed(llama: Path, tools: _Tools, tmp_path: Path) -> None:
    tools.put(tools.build, "sys.exit(0)")
    answer = _execute(
        *(llama, "--run", "--output", tmp_path / "out", "--trtllm-examples", tools.examples),
        PATH=tools.path,
    )
    assert answer.returncode == 1
    assert f"trtllm-build left no {tmp_path}/out/engine/config.json" in answer.stderr


def test_what_does_not_fit_is_not_run(llama: Path, tools: _Tools) -> None:
    answer = _execute(llama, "--run", "--gpu", "T4", "--trtllm-examples", tools.examples)
    assert answer.returncode == 1
    assert "nothing was run" in answer.stderr
    assert not tools.calls()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_step_and_all_it_started(
    llama: Path, tools: _Tools, tmp_path: Path, number: signal.Signals
) -> None:
    # This child outlives its parent unless the whole process group is ended.
    tools.put(
        tools.examples / "llama" / "convert_checkpoint.py",
        "import subprocess\nsubprocess.Popen(['sleep', '600'])\nprint('begun', flush=True)\n"
        "time.sleep(600)",
    )
    command = _command(
        *(llama, "--run", "--output", tmp_path / "out", "--trtllm-examples", tools.examples)
    )
    # The stand-in starts `sleep`, so it needs the normal PATH too.
    environment = os.environ | {"PATH": f"{tools.path}:{os.environ['PATH']}"}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            while (line := process.stdout.readline()) != "begun\n":
                assert line, "it ended early"
            started = psutil.Process(process.pid).children(recursive=True)
            assert {"sleep"} < {child.name() for child in started}
            process.send_signal(number)
            assert process.wait(WITHIN) == 128 + number
        finally:
            process.kill()
    deadline = time.monotonic() + WITHIN
    while any(_runs(child) for child in started) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not [child for child in started if _runs(child)]
    assert [call[0] for call in tools.calls()] == ["convert_checkpoint.py"]


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False

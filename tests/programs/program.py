"""A program of a package registry, and one run of it against the gateway."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from tests.programs.engine.script import Script
from tests.programs.engine.stack import MODEL, ScriptedStack
from tests.programs.recorder import Exchange, Recorder
from tests.support.patience import PATIENCE_S

KEY = "no-key-is-needed"
"""API key for programs that do not start without one. The gateway itself has no tenants."""
TEXT = '<p> </parameter> </p>\n"</tool_call>" \\ \N{OWL}\n</arg_value> {"a": [\n'
"""Text for a tool to write. It has strings that end values and calls in models' call formats."""
_KEPT_VARIABLES = ("PATH", "LANG", "LC_ALL", "TZ")


class NotAvailable(Exception):
    """Error that a program cannot be installed here, for example without a JVM. No failure."""


@dataclass
class Workspace:
    """A temporary home and working folder, with words that only tools can read."""

    home: Path
    project: Path
    url: str
    """The gateway's URL without a path."""
    installed: Path
    """The folder of the installed program."""
    model: str = MODEL
    files: dict[Path, str] = field(default_factory=dict)
    """Expected text by path of the files that the program's tools write."""
    words: list[str] = field(default_factory=list)
    """Words that the program's tools read."""

    @property
    def answer(self) -> str:
        """The scripted engine's answer if each tool has read its word."""
        return Script().answer.replace("{found}", ", ".join(sorted(self.words)))

    def new_word(self) -> str:
        """Return a new word for a file or a tool's result, which the expected answer includes."""
        word = f"word-{secrets.token_hex(4)}"
        self.words.append(word)
        return word

    def write_note(self, name: str = "note.txt") -> Path:
        """Write a file with a new word to the project folder."""
        path = self.project / name
        path.write_text(f"The secret is {self.new_word()}.\n", encoding="utf-8")
        return path

    def new_file(self) -> Path:
        """Return a path to which a tool must write `TEXT`."""
        path = self.project / "made.txt"
        self.files[path] = TEXT
        return path


class Program(ABC):
    """A program that is installed once per version and run once."""

    name: str
    registry: str
    """The section in versions.toml."""
    packages: Sequence[str]
    """Packages in that section. The first one's version is reported as the program's."""
    well_known: str
    """A package that the registry certainly has."""
    tools: Sequence[str] = ()
    """Commands that installing and running need."""
    timeout_s: float = PATIENCE_S

    @abstractmethod
    def install(self, folder: Path, versions: Mapping[str, str]) -> None:
        """Install the packages into an empty folder. Only this step may use the network."""

    @abstractmethod
    def newest_version(self, package: str) -> str:
        """Return the newest version of a package in the registry."""

    @abstractmethod
    def prepare(self, workspace: Workspace) -> Script:
        """Write configuration and files for the tools. Return the engine's script."""

    @abstractmethod
    def command(self, workspace: Workspace) -> Sequence[str | Path]: ...

    def follow_up(self, workspace: Workspace) -> Sequence[str | Path]:
        """Return a command that resumes the session, which sends all of it again."""
        return ()

    def environment(self, workspace: Workspace) -> Mapping[str, str]:
        """Return environment variables besides HOME and PATH."""
        return {}

    def judge(self, workspace: Workspace, output: str) -> list[str]:
        """Return problems with the output and files of a program that exited with 0."""
        problems = [
            f"{path.name} is not as it was to be written"
            for path, text in workspace.files.items()
            if not path.exists() or path.read_text(encoding="utf-8") != text
        ]
        if workspace.answer not in output:
            problems.append(f"not in the output: {workspace.answer}")
        return problems


@dataclass(frozen=True)
class Result:
    """The result of a run."""

    problems: list[str]
    """Problems of the run, empty if it passed."""
    output: str
    exchanges: list[Exchange]
    seconds: float


def run_program(program: Program, stack: ScriptedStack, installed: Path, folder: Path) -> Result:
    """Run a program with a new home in `folder`, and return its result."""
    home, project, temporary = (folder / name for name in ("home", "project", "tmp"))
    for each in (home, project, temporary):
        each.mkdir(parents=True)
    recorder = Recorder(stack.gateway.port)
    workspace = Workspace(home, project, recorder.url, installed)
    stack.use(program.prepare(workspace))
    environment = {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ}
    environment |= {"HOME": str(home), "TMPDIR": str(temporary), "TERM": "dumb", "CI": "1"}
    environment |= program.environment(workspace)
    log = folder / "output.log"
    outputs: list[str] = []
    problems: list[str] = []
    began = time.monotonic()
    with recorder.running():
        for command in (program.command(workspace), program.follow_up(workspace)):
            if command and not problems:
                words = [str(word) for word in command]
                code = _run(words, project, environment, log, program.timeout_s)
                outputs.append(log.read_text(encoding="utf-8", errors="replace"))
                if code == 0:
                    problems += program.judge(workspace, outputs[-1])
                else:
                    problems.append(f"exit code {code}")
    seconds = time.monotonic() - began
    exchanges = recorder.exchanges()
    return Result(problems + _refusals(exchanges), "\n".join(outputs), exchanges, seconds)


def _refusals(exchanges: Sequence[Exchange]) -> list[str]:
    """Return the statuses of POST requests that failed. Other requests may be probes."""
    statuses = [each.response and each.response.status for each in exchanges if each.is_post]
    refused = Counter(status for status in statuses if status is None or status >= 300)
    return [f"{count} x {status or 'no answer'}" for status, count in refused.items()]


def _run(
    command: Sequence[str], folder: Path, environment: Mapping[str, str], log: Path, limit_s: float
) -> int | str:
    """Return the exit code. Processes left behind by the program are killed."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return f"none after {limit_s:.0f} s"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

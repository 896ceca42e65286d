"""Run the commands in the guides, and write their output into the guides: ``python -m docs.rerun``.

Each guide is a separate session in a new folder, from top to bottom. Only these blocks of the
Markdown are used:

- A ``console`` block has commands after ``$``, each with its output. A command continues on the
  next line if a line ends with a backslash or a quote is open. Exported variables persist. A
  command that prints ``ready: URL`` is a server. Servers and background processes run until the
  session ends. If the exit code of a command is not 0, the last line of its output shows the code.
- A block after ``<!-- file: NAME -->`` is written to that file.
- ``<!-- rerun: figures -->`` before a console block: its numbers are measured, so they differ in
  each run.
- ``<!-- rerun: slow -->``: the block is skipped unless ``--slow`` is given. Its numbers are
  measured.
- ``<!-- rerun: engine -->``: the block needs a Docker engine. Only `make test-containers` runs it.

Values that differ in each run (ids, times, keys) are not compared. An output that differs only in
such values is not rewritten. ``--check`` compares the guides with the new outputs, and writes
nothing. It ignores measured numbers. If a guide differs, its commands run a second time, because
some outputs (such as an answer cut off by a deadline) are wrong on a busy machine.

If the system allows it, the commands run in new network and process namespaces. All ports are free
there, and no process survives. Otherwise the ports in the guides must be free.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import fcntl
import os
import re
import shlex
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parent.parent
GUIDES = [
    path
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
    if "```console\n" in path.read_text(encoding="utf-8")
]
# Path that the guides show instead of two real paths: the temporary folder of the session, and the
# source tree. The temporary folder has links to the folders `LINKED` of the source tree.
SHOWN_FOLDER = "/home/you/gateway"
LINKED = ("demo", "deploy")
TIMEOUT_S = 240.0
_ALONE = "DOCS_RERUN_ALONE"
NOT_DONE = "not done in"

_BLOCK = re.compile(
    r"(?:<!-- (?P<key>file|rerun): (?P<value>[^\n]+?) -->\n+)?"
    r"^```(?P<language>\w*)\n(?P<body>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
_READY = re.compile(r"^ready: .+\n", re.MULTILINE)
# Lines that `gateway up` prints while it waits for its processes. They are removed from the output,
# because their number depends on the machine.
_WAITING = re.compile(r"^\w+: not ready yet .*\n", re.MULTILINE)
_VOLATILE = [
    (re.compile(pattern), name)
    for pattern, name in (
        (r"\b(chatcmpl|cmpl|call)-[0-9a-f]{32}\b", r"\1-ID"),
        (r"\b[0-9a-f]{32}\b", "ID"),
        (r"\b[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}\b", "UUID"),
        (r"\bsk-[\w-]{43}", "KEY"),
        (r"\bkey_[0-9a-f]{24}\b", "KEY-ID"),
        (r"\bsha256:[0-9a-f]{8}\b", "sha256:BEGINNING"),
        (r'"task_id": "\d+"', '"task_id": "ID"'),
        (r"\bsha256:[0-9a-f]{64}\b", "HASH"),
        (r"\bfp_[0-9a-f]{12}\b", "FINGERPRINT"),
        (r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d([.,]\d+)?(Z|[+-]\d\d:?\d\d)?", "TIME"),
        (r"\b127\.0\.0\.1:\d{5}\b", "ADDRESS"),
        (r"\b1\.?\d{9}(\.\d+(e\+\d\d)?)?\b", "TIME"),  # seconds since 1970
        (r"\b1\.\d+e\+09\b", "TIME"),
        (r"\b(\d+h)?(\d+m)?\d+(\.\d+)? ?m?s\b", "DURATION"),
        (r"(_seconds(_sum)?(\{[^}]*\})?) [\d.e-]+", r"\1 DURATION"),
        (r'("?pid"?|process)[ :=]+\d+', r"\1 PID"),
    )
]


@dataclass
class Command:
    """A command in a console block, and its output. Both texts end with a newline."""

    text: str
    output: str


def parse(body: str) -> list[Command]:
    """Return the commands in a console block.

    Raises ValueError if the block does not begin with a command, or if the last command is not
    complete.
    """
    commands: list[Command] = []
    lines = iter(body.splitlines(keepends=True))
    for line in lines:
        if not line.startswith("$ "):
            if not commands:
                raise ValueError(f"a console block begins with a command, found {line!r}")
            commands[-1].output += line
            continue
        text = line.removeprefix("$ ")
        while _is_continued(text):
            text += next(lines, "") or _raise(ValueError(f"the command does not end: {text}"))
        commands.append(Command(text, ""))
    return commands


def _is_continued(text: str) -> bool:
    if text.endswith("\\\n"):
        return True
    try:
        shlex.split(text)
    except ValueError:
        return True
    return False


def _raise(error: Exception) -> str:
    raise error


def same(old: str, new: str, figures: bool) -> bool:
    """Return True if two outputs are equal, except for values that differ in each run.

    If `figures` is True, also ignore the values of all numbers.
    """
    return _plain(old, figures) == _plain(new, figures)


def _plain(text: str, figures: bool) -> str:
    for pattern, name in _VOLATILE:
        text = pattern.sub(name, text)
    if figures:
        # Ignore the width of table columns, which depends on the length of the numbers.
        text = re.sub(r"[+-]?\d[\d,]*(\.\d+)?", "N", text)
        text = re.sub(r"-{3,}", "---", re.sub(r"[ \t]+", " ", text))
    return text


class Session:
    """A shell session in which the commands of one guide run, one after the other.

    Its folder is new, and contains only links to the folders `LINKED` of the source tree.
    """

    def __init__(self, folder: Path | None = None, **variables: str) -> None:
        """Create the session, with additional environment variables.

        If `folder` is given, the commands run in this folder, which is removed at the end.
        """
        self.folder = folder or _linked_folder()
        self._private = Path(tempfile.mkdtemp(prefix="docs-shell-"))
        self._exports = self._private / "exports"
        self._exports.touch()
        self._processes: list[subprocess.Popen[bytes]] = []
        strange = ("GATEWAY_", "OPENAI_", "PYTEST_")
        self._environment = {
            name: value for name, value in os.environ.items() if not name.startswith(strange)
        } | {
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "COLUMNS": "100",
            "LC_ALL": "C.UTF-8",
            **variables,
        }

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        for process in reversed(self._processes):
            _end(process.pid)
            process.wait()
        _end_all_others()
        shutil.rmtree(self.folder)
        shutil.rmtree(self._private)

    def run(self, command: str) -> str:
        """Run a command, and return its stdout and stderr, and its exit code if this is not 0.

        If the command prints a line ``ready: URL``, return at once, and leave the command running.
        Raises TimeoutError if `TIMEOUT_S` seconds pass without this line or the command's end.
        """
        script = f". {self._exports}\n{command}\ncode=$?; export -p > {self._exports}; exit $code"
        log = self._private / f"{len(self._processes)}.log"
        with log.open("wb") as file:
            process = subprocess.Popen(
                ["bash", "-c", script],
                cwd=self.folder,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._processes.append(process)
        deadline = time.monotonic() + TIMEOUT_S
        while process.poll() is None and not _READY.search(log.read_text()):
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"{NOT_DONE} {TIMEOUT_S:.0f} s: {command}\n{log.read_text()}"
                    f"{self.logs()}{_processes()}"
                )
            time.sleep(0.02)
        text = self._normalize(log.read_text(encoding="utf-8"))
        if process.returncode:
            text += f"[exit code {process.returncode}]\n"
        return text

    def logs(self) -> str:
        """Return the ends of the log files that the commands have written, for error messages."""
        paths = sorted(self.folder.glob("*.log"))
        return "".join(f"{path.name}:\n{path.read_text()[-3000:]}\n" for path in paths)

    def _normalize(self, text: str) -> str:
        for folder in (self.folder, ROOT):
            text = text.replace(str(folder), SHOWN_FOLDER)
        text = "".join(line.rstrip() + "\n" for line in text.splitlines())
        return _WAITING.sub("", text)


def _linked_folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="docs-")).resolve()
    for name in LINKED:
        (folder / name).symlink_to(ROOT / name)
    return folder


def _processes() -> str:
    """Return a line about each process, for the error message about a hanging command."""
    lines = []
    for process in psutil.process_iter(["pid", "ppid", "status", "name", "cmdline"]):
        pid, parent, status, name, command = (
            process.info[field] for field in ("pid", "ppid", "status", "name", "cmdline")
        )
        lines.append(f"{pid} of {parent}, {status}: {name} {' '.join(command or ())[:200]}\n")
    return "".join(lines)


def _end(group: int) -> None:
    """End the remaining processes of a process group, and wait until they have ended.

    Only the topmost processes get SIGTERM, and end their own children. If the processes of Triton's
    models were also ended, Triton would wait for them until its timeout.
    """
    # Read the parents of all processes first, because the children of an ended process get another
    # parent.
    members = {member.pid: (member, parent) for member, parent in _members(group)}
    for member, parent in members.values():
        if parent == group or parent not in members:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.terminate()
    deadline = time.monotonic() + TIMEOUT_S
    while left := [member for member, _ in _members(group)]:
        if time.monotonic() > deadline:
            for member in left:
                with contextlib.suppress(psutil.NoSuchProcess):
                    member.kill()
        time.sleep(0.05)


def _end_all_others() -> None:
    """Kill and reap all remaining processes if this process is the init of a process namespace.

    Print their names first. Without the reaping, these processes would remain as zombies, and look
    like running processes.
    """
    if _ALONE not in os.environ or os.getpid() != 1:
        return
    for process in psutil.process_iter():
        if process.pid != 1:
            with contextlib.suppress(psutil.NoSuchProcess):
                print(f"left: {process.name()}, {process.status()}", file=sys.stderr)
    with contextlib.suppress(ProcessLookupError):
        os.kill(-1, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        while True:
            os.waitpid(-1, 0)


def _members(group: int) -> Iterator[tuple[psutil.Process, int]]:
    """Yield the running processes of a group, each with the process id of its parent."""
    for pid in psutil.pids():
        with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
            if os.getpgid(pid) == group:
                process = psutil.Process(pid)
                if process.status() != psutil.STATUS_ZOMBIE:
                    yield process, process.ppid()


def rerun(guide: str, *, slow: bool, keep_figures: bool) -> str:
    """Run the commands of a guide, and return the guide's text with their current output.

    Args:
        guide: the Markdown text of the guide.
        slow: True to also run the blocks that are marked as slow.
        keep_figures: True to keep the old output if only measured numbers differ.

    Raises:
        ValueError: a block is invalid.
        TimeoutError: a command does not end.
        RuntimeError: a command that is a server, according to its old output, does not become
            ready.
    """
    left_alone = {"engine"} if slow else {"engine", "slow"}
    with Session() as session:
        return _rerun_in(session, guide, left_alone, keep_figures)


def rerun_on_engine(guide: str, folder: Path, engine: Mapping[str, str]) -> str:
    """Run all commands of a guide, also those that need a Docker engine.

    Return the guide's text with their current output. The commands run in `folder`, a temporary
    copy of the source tree, which is removed at the end. `engine` has the environment variables
    with which Docker's client finds the engine.
    """
    with Session(folder, **engine) as session:
        return _rerun_in(session, guide, set(), keep_figures=True)


def _rerun_in(session: Session, guide: str, left_alone: set[str], keep_figures: bool) -> str:
    parts, position = [], 0
    for block in _BLOCK.finditer(guide):
        parts.append(guide[position : block.start("body")])
        parts.append(_rerun_block(session, block, left_alone, keep_figures))
        position = block.end("body")
    return "".join(parts) + guide[position:]


def _rerun_twice(guide: str, slow: bool, keep_figures: bool) -> str:
    """Call `rerun`, and return its result.

    If `keep_figures` is True and the result differs from the guide, call `rerun` a second time. The
    first result may be wrong because the machine was busy.
    """
    if keep_figures:
        try:
            if rerun(guide, slow=slow, keep_figures=True) == guide:
                return guide
        except (TimeoutError, RuntimeError) as error:
            print(error, file=sys.stderr)
    return rerun(guide, slow=slow, keep_figures=keep_figures)


def _rerun_block(
    session: Session, block: re.Match[str], left_alone: set[str], keep_figures: bool
) -> str:
    body, key, value = block["body"], block["key"], block["value"]
    if key == "file":
        path = session.folder / value
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(body, encoding="utf-8")
    if block["language"] != "console":
        return body
    if key == "rerun" and value not in {"figures", "slow", "engine"}:
        raise ValueError(f"rerun: found {value!r}, allowed figures, slow or engine")
    commands = parse(body)
    if value in left_alone:
        return body
    text = ""
    for command in commands:
        print(f"  $ {command.text}", end="", file=sys.stderr, flush=True)
        output = session.run(command.text)
        if _READY.search(command.output) and not _READY.search(output):
            raise RuntimeError(f"no server: {command.text}{output}{session.logs()}")
        if same(command.output, output, figures=keep_figures and value in {"figures", "slow"}):
            output = command.output
        text += f"$ {command.text}{output}"
    return text


def enter_own_namespaces() -> bool:
    """Replace this process with a copy of this program in new network and process namespaces.

    In the copy, mount a private /dev/shm, enable the loopback interface and return True. With the
    private /dev/shm, Triton cannot use the shared memory files of another Triton, and leaves none
    behind. Return False if the system does not allow namespaces.
    """
    unshare = ["unshare", "--user", "--map-current-user", "--keep-caps", "--net"]
    unshare += ["--pid", "--fork", "--kill-child", "--mount-proc"]
    if _ALONE not in os.environ:
        if subprocess.run([*unshare, "true"], capture_output=True, check=False).returncode:
            return False
        os.environ[_ALONE] = "yes"
        os.execvp(unshare[0], [*unshare, sys.executable, "-m", "docs.rerun", *sys.argv[1:]])
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", "/dev/shm"], check=True)
    set_loopback_up()
    return True


def set_loopback_up() -> None:
    """Enable the loopback interface in a new, empty network namespace."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as handle:
        set_flags, up_and_running = 0x8914, 0x1 | 0x40  # SIOCSIFFLAGS; IFF_UP, IFF_RUNNING
        fcntl.ioctl(handle, set_flags, struct.pack("16sH14x", b"lo", up_and_running))


def main() -> int:
    """Return the exit code: 1 if a guide differs from the output of its commands, else 0."""
    parser = argparse.ArgumentParser(
        prog="python -m docs.rerun", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("guides", nargs="*", type=Path, metavar="FILE", help="default: all")
    parser.add_argument("--check", action="store_true", help="compare, write nothing")
    parser.add_argument("--slow", action="store_true", help="also what takes minutes")
    parsed = parser.parse_args()
    if not enter_own_namespaces():
        print("no namespaces: ports must be free and no other Triton run", file=sys.stderr)
    differs = False
    for path in parsed.guides or GUIDES:
        print(path, file=sys.stderr, flush=True)
        old = path.read_text(encoding="utf-8")
        new = _rerun_twice(old, parsed.slow, keep_figures=parsed.check)
        if new == old:
            continue
        differs = True
        if parsed.check:
            shown, found = (text.splitlines(keepends=True) for text in (old, new))
            names = str(path), "as printed now"
            sys.stdout.writelines(difflib.unified_diff(shown, found, *names))
        else:
            path.write_text(new, encoding="utf-8")
    return int(parsed.check and differs)


if __name__ == "__main__":
    sys.exit(main())

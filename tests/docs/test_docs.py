"""Names in the guides exist: commands with options, settings, metrics, files."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from docs import generate
from gateway.config.settings import Settings
from ops.cli import COMMANDS, with_dashes
from ops.commands.up import DEMO_ADAPTERS

# Variables that commands such as `gateway lora` read, and the gateway itself does not.
CLIENT_VARIABLES = {"GATEWAY_URL"}
SUFFIXES = ("", "_bucket", "_sum", "_count", "_created")
FOLDERS = ("adapters", "bench", "demo", "deploy", "docs", "gateway", "ops", "tests", "triton_repo")

guides = pytest.mark.parametrize("path", generate.FILES, ids=generate.name)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:
        raise ValueError(message)


def _parser() -> _Parser:
    parser = _Parser(prog="gateway", allow_abbrev=False)
    commands = parser.add_subparsers(required=True)
    for name, module, _ in COMMANDS:
        module.add_arguments(commands.add_parser(name, allow_abbrev=False))
    return parser


def _shell_lines(text: str) -> Iterator[str]:
    """Yield the commands in shell blocks. Continued lines are joined."""
    for language, body in re.findall(r"^```(\w*)\n(.*?)^```$", text, re.M | re.S):
        joined = re.sub(r"\\\n\s*", " ", body)
        if language == "console":
            yield from (line[2:] for line in joined.splitlines() if line.startswith("$ "))
        elif language == "sh":
            yield from joined.splitlines()


def _gateway_commands(text: str) -> Iterator[list[str]]:
    """Yield the arguments of each `gateway` command in a shell block."""
    for line in _shell_lines(text):
        if "gateway " not in line:
            continue
        plain = re.sub(r"\d?>+ ?\S+", "", line)
        tokens = shlex.shlex(plain, posix=True, punctuation_chars="();|&")
        tokens.whitespace_split = True
        words: list[str] = []
        for word in [*tokens, ";"]:
            if word[0] not in "();|&":
                words.append(word)
                continue
            while words and re.match(r"\w+=", words[0]):
                words.pop(0)
            if words and words[0] == "gateway":
                yield words[1:]
            words = []


def _spans(text: str) -> Iterator[list[str]]:
    """Yield the words of each `gateway ...` in running text, where arguments may be missing."""
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)
    for span in re.findall(r"`gateway ([a-z][^`]*)`", prose):
        yield span.split()


@guides
def test_commands_have_these_options(path: Path) -> None:
    for arguments in _gateway_commands(path.read_text(encoding="utf-8")):
        try:
            _parser().parse_args(list(with_dashes(arguments)))
        except ValueError as error:
            pytest.fail(f"gateway {shlex.join(arguments)}: {error}")


@guides
def test_adapters_that_are_added_have_names_of_their_own(path: Path) -> None:
    """Check that guides add adapters under new names.

    README.md runs `gateway up` first, so the folder already has the demo's adapters.
    """
    for arguments in _gateway_commands(path.read_text(encoding="utf-8")):
        if arguments[:2] == ["lora", "add"]:
            assert not (DEMO_ADAPTERS / arguments[2]).exists(), shlex.join(arguments)


@guides
def test_commands_in_running_text_exist(path: Path) -> None:
    for words in _spans(path.read_text(encoding="utf-8")):
        parser: argparse.ArgumentParser = _parser()
        for word in words:
            name = word.partition("=")[0]
            if name.startswith("-"):
                assert name in parser._option_string_actions, f"gateway {' '.join(words)}: {name}"
            elif (inner := _subparsers(parser)) is not None:
                assert word in inner, f"gateway {' '.join(words)}: {word}"
                parser = inner[word]


def _subparsers(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser] | None:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    return None


@guides
def test_settings_exist(path: Path) -> None:
    known = {f"GATEWAY_{name.upper()}" for name in Settings.model_fields} | CLIENT_VARIABLES
    text = path.read_text(encoding="utf-8")
    assert set(re.findall(r"\bGATEWAY_[A-Z_]*[A-Z]\b", text)) <= known


@guides
def test_metrics_exist(path: Path) -> None:
    operations = (generate.ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    table = operations.partition("<!-- begin: metrics -->")[2].partition("<!-- end")[0]
    known = set(re.findall(r"`(\w+)`", table))
    for name in re.findall(r"(?<![/-])\bgateway_[a-z_]*[a-z]\b", path.read_text(encoding="utf-8")):
        stems = [name.removesuffix(suffix) for suffix in SUFFIXES]
        # A prefix is enough, as guides name several metrics by one pattern.
        assert any(metric.startswith(stem) for metric in known for stem in stems), name


@guides
def test_links_and_files_exist(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text):
        assert target.startswith("https://") or (path.parent / target).exists(), target
    for name in re.findall(rf"`((?:{'|'.join(FOLDERS)})/[\w./-]+)`", text):
        assert (generate.ROOT / name).exists(), name


@guides
def test_no_path_of_a_certain_machine(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert str(generate.ROOT) not in text
    assert not re.search(r"/(tmp|work|root)/", text)

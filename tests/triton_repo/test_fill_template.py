"""Filling of one config.pbtxt with arguments in the syntax of fill_template.py."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triton_repo.fill_template import (
    SubstitutionError,
    fill,
    main,
    parse_substitutions,
    unknown_keys,
)
from triton_repo.render import TEMPLATES


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("a:b", {"a": "b"}),
        ("a:b,c:d", {"a": "b", "c": "d"}),
        ("a:", {"a": ""}),
        ("a:1,a:2", {"a": "2"}),
        (r"gpu_device_ids:0\,1;2\,3", {"gpu_device_ids": "0,1;2,3"}),
        (r"medusa_choices:{0\, 0}\,{0\, 1}", {"medusa_choices": "{0, 0},{0, 1}"}),
        (r"dir:C\\:/engines", {"dir": "C:/engines"}),
        (r"a:x\\\\y", {"a": r"x\y"}),
        ("", {}),
    ],
)
def test_the_form_and_its_escapes(text: str, values: dict[str, str]) -> None:
    assert parse_substitutions(text) == values


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a:b,", "'': found 0 colons"),
        ("a", "'a': found 0 colons"),
        ("a:b:c", "'a:b:c': found 2 colons"),
        # The first of the two splits removes one backslash.
        (r"dir:C\:/engines", "'dir:C:/engines': found 2 colons"),
    ],
)
def test_what_is_not_key_and_value_is_named(text: str, problem: str) -> None:
    with pytest.raises(SubstitutionError) as raised:
        parse_substitutions(text)
    assert str(raised.value).startswith(problem)


@given(st.dictionaries(st.text(min_size=1), st.text(), min_size=1))
def test_any_values_can_be_written_with_escapes(values: dict[str, str]) -> None:
    def escaped(text: str) -> str:
        for _ in range(2):
            text = text.replace("\\", "\\\\").replace(",", "\\,").replace(":", "\\:")
        return text

    text = ",".join(f"{escaped(key)}:{escaped(value)}" for key, value in values.items())
    assert parse_substitutions(text) == values


def test_presets_stand_where_nothing_is_given_and_the_rest_stays() -> None:
    assert fill("${max_queue_size} ${x} $$", {}) == "0 ${x} $"
    assert fill("${max_queue_size} ${x}", {"max_queue_size": "9", "x": "1"}) == "9 1"


def test_keys_that_the_file_does_not_have() -> None:
    assert unknown_keys('${a} "b"\n  # c', {"a": "1", "b": "2", "c": "3"}) == ["c"]


def _run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


@pytest.mark.parametrize(
    "command", [("-m", "triton_repo.fill_template"), ("-m", "ops", "repo", "fill")]
)
def test_the_command_line_is_that_of_upstream(tmp_path: Path, command: tuple[str, ...]) -> None:
    template = TEMPLATES / "postprocessing" / "config.pbtxt"
    values = "tokenizer_dir:/hf,triton_max_batch_size:8,postprocessing_instance_count:1"
    shown = _run(*command, template, values)
    assert shown.returncode == 0
    assert 'string_value: "/hf"' in shown.stdout
    assert "${skip_special_tokens}" in shown.stdout
    copy = tmp_path / "config.pbtxt"
    for flag in ("-i", "--in_place"):
        copy.write_text(template.read_text())
        written = _run(*command, flag, copy, values)
        assert (written.returncode, written.stdout, written.stderr) == (0, "", "")
        assert copy.read_text() + "\n" == shown.stdout


def test_an_unknown_key_warns_or_with_strict_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.pbtxt"
    path.write_text("max_batch_size: ${a}\n")
    assert main([str(path), "a:1,none:2"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "max_batch_size: 1\n\n"
    assert captured.err == f"{path}: key 'none' does not exist in the file\n"
    assert main(["-i", "--strict", str(path), "a:1,none:2"]) == 1
    assert path.read_text() == "max_batch_size: ${a}\n"


def test_what_cannot_be_read_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "x"), "a:1"]) == 1
    assert "No such file" in capsys.readouterr().err
    assert main([str(tmp_path / "x"), "a:1,"]) == 1
    assert "found 0 colons" in capsys.readouterr().err

"""Rerunning the guides' commands, and comparing their output with the guides."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from docs import generate, rerun

ID = "chatcmpl-51bac07065674cbe9064e9e0d0aaa372"
OTHER_ID = ID.replace("5", "6")


def _block(*commands: str) -> str:
    return "```console\n" + "".join(commands) + "```\n"


def _rerun(guide: str, slow: bool = False) -> str:
    return rerun.rerun(guide, slow=slow, keep_figures=True)


def test_commands_of_several_lines() -> None:
    body = "$ echo a \\\n  b\na b\n$ echo 'c\n  d'\nc\n  d\n$ true\n"
    assert rerun.parse(body) == [
        rerun.Command("echo a \\\n  b\n", "a b\n"),
        rerun.Command("echo 'c\n  d'\n", "c\n  d\n"),
        rerun.Command("true\n", ""),
    ]


@pytest.mark.parametrize("body", ["no command\n", "$ echo 'never closed\n"])
def test_blocks_that_are_wrong(body: str) -> None:
    with pytest.raises(ValueError, match="command"):
        rerun.parse(body)


def test_what_differs_in_each_run_is_no_difference() -> None:
    old = f'{{"id": "{ID}", "created": 1795202250}} took 1.5 ms\n'
    new = f'{{"id": "{OTHER_ID}", "created": 1795202999}} took 21 ms\n'
    assert rerun.same(old, new, figures=False)
    assert not rerun.same(old, new.replace("took", "cost"), figures=False)
    assert not rerun.same("tokens: 5\n", "tokens: 6\n", figures=False)
    assert rerun.same("| a |  5.25 |\n", "| a | 16.5 |\n", figures=True)


@example("a b", "a  b")
@example("a", "a ")
@example("a", "A")
@given(words := st.text("abcxyz äß", max_size=20), words)
def test_words_are_the_same_only_if_they_are_equal(old: str, new: str) -> None:
    assert rerun.same(old, new, figures=False) == (old == new)


def test_a_session_writes_what_commands_print_and_what_is_right_stays() -> None:
    guide = "<!-- file: words.txt -->\n```text\none\n```\n\n" + _block(
        "$ export WORD=two\n", f"$ cat words.txt; echo $WORD {ID}\n", "old\n", "$ exit 3\n"
    )
    found = _rerun(guide)
    assert f"{ID}\none\ntwo {ID}\n$ exit 3\n[exit code 3]\n```" in found
    assert _rerun(found.replace(f"two {ID}", f"two {OTHER_ID}")).count(OTHER_ID) == 1
    assert _rerun(found) == found


def test_figures_are_kept_by_the_check_alone() -> None:
    guide = "<!-- rerun: figures -->\n" + _block("$ echo took 5\n", "took 4\n")
    assert _rerun(guide) == guide
    assert "took 4" not in rerun.rerun(guide, slow=False, keep_figures=False)


def test_a_server_stays_until_the_session_ends(tmp_path: Path) -> None:
    mark = tmp_path / "ended"
    script = f"trap 'touch {mark}; exit' TERM; echo ready: here; while :; do sleep 0.1; done"
    guide = _block(f"$ bash -c {rerun.shlex.quote(script)}\n", f"$ ls {mark}\n")
    assert "ready: here\n" in _rerun(guide)
    assert mark.exists()


def test_slow_blocks_are_left_alone() -> None:
    guide = "<!-- rerun: slow -->\n" + _block("$ echo now\n", "then\n")
    assert _rerun(guide) == guide
    assert "now\n```" in _rerun(guide, slow=True)


def test_what_needs_an_engine_is_left_to_the_suite_that_has_one(tmp_path: Path) -> None:
    folder = tmp_path / "clone"
    folder.mkdir()
    guide = "<!-- rerun: engine -->\n" + _block("$ echo $DOCKER_HOST; pwd\n", "nowhere\n")
    assert _rerun(guide, slow=True) == guide
    found = rerun.rerun_on_engine(guide, folder, {"DOCKER_HOST": "here"})
    assert f"here\n{rerun.SHOWN_FOLDER}\n```" in found
    assert not folder.exists()


def test_an_unknown_mark_is_refused() -> None:
    with pytest.raises(ValueError, match="rerun: found"):
        _rerun("<!-- rerun: never -->\n" + _block("$ true\n"))


@pytest.mark.parametrize("path", generate.FILES, ids=generate.name)
def test_every_command_that_is_shown_was_run(path: Path) -> None:
    """Check that each console block has output. A block without output was never run."""
    for block in rerun._BLOCK.finditer(path.read_text(encoding="utf-8")):
        if block["language"] == "console":
            assert any(command.output for command in rerun.parse(block["body"])), block["body"]

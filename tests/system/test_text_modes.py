"""The OpenAI tests of the public door, through the text models as far as they go."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

TESTS = Path(__file__).parents[1]
FILES = ("system/test_chat.py", "clients/test_openai.py", "system/test_parameters.py")
# What needs token ids, or log probabilities, which belong to them.
NO_TOKENS = {
    "test_events_of_text",
    "test_penalties_reach_the_engine",
    "test_prompts_as_lists_and_token_ids",
    "test_special_tokens_can_be_shown",
    "test_stop_token_ids",
    "test_token_ids_can_be_returned",
    "test_truncate_prompt_tokens_keeps_the_end",
}
SKIPPED = {
    "ensemble": NO_TOKENS
    | {
        "test_no_character_is_ever_broken",
        "test_wild_sampling_never_shows_a_replacement_character",
        "test_structured_outputs",
    },
    "bls": NO_TOKENS | {"test_beam_search_finds_the_likeliest"},
}


@pytest.mark.slow
@pytest.mark.parametrize("mode", SKIPPED)
def test_the_openai_tests_through(mode: str, tmp_path: Path) -> None:
    files = [str(TESTS / name) for name in FILES]
    report = tmp_path / "report.xml"
    # Its cache is that of the run around it.
    options = ["-q", "-p", "no:cacheprovider", f"--triton-mode={mode}", f"--junitxml={report}"]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *files],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        cwd=TESTS.parent,
    )
    assert run.returncode == 0, run.stdout[-5000:] + run.stderr[-2000:]
    skipped = {
        case.attrib["name"].partition("[")[0]
        for case in ElementTree.parse(report).iter("testcase")
        if case.find("skipped") is not None
    }
    assert skipped == SKIPPED[mode]

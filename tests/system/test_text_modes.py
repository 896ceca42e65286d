"""OpenAI API tests run through text models, as far as these support the API."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

TESTS = Path(__file__).parents[1]
OPENAI = ("system/test_chat.py", "clients/test_openai.py", "system/test_parameters.py")
STREAMED = tuple(
    f"system/test_chat.py::{name}"
    for name in (
        "test_a_question_is_answered",
        "test_streamed_chunks_have_openais_form",
        "test_the_raw_stream_is_what_proxies_and_parsers_expect",
        "test_usage_comes_in_a_last_chunk_only_when_asked_for",
        "test_no_character_is_ever_broken",
        "test_counting_goes_on_for_hundreds_of_tokens",
        "test_max_tokens_ends_with_length",
        "test_a_stop_string_ends_the_text_before_it",
        "test_a_conversation_with_all_roles_and_text_parts",
        "test_the_async_client_streams",
        "test_completions",
        "test_several_choices_are_numbered_and_drawn_apart",
        "test_chat_choices_each_open_with_the_role_and_finish",
        "test_a_stop_string_ends_one_choice_alone",
        "test_prompts_as_lists_and_token_ids",
    )
)
FILES = {
    "ensemble": OPENAI,
    # To the SDK the ensemble behaves like BLS.
    "bls": ("system/test_chat.py", "system/test_parameters.py"),
    # llmapi loads adapters differently, so their tests run too.
    "llmapi": (*OPENAI, "system/test_adapters.py"),
    # These releases differ only in how a stream arrives and ends. Sampling is the same.
    "llmapi-1.3": STREAMED,
    "llmapi-1.2": STREAMED,
}
# Known crashes of Triton's Python backend under a BLS model: memory freed by two threads, or a
# process without CPU for a second (2.51; github.com/triton-inference-server/server/issues/8882).
# The failures that follow a crash are not the gateway's.
DEATHS = (
    "boost::interprocess::lock_exception",
    "std::bad_alloc",
    "malloc(): ",
    "Signal (11) received",
    "triton: the process of a model has died",
)
TAKES_IDS = "test_prompts_as_lists_and_token_ids"
# Tests that need token ids, or log probabilities, which are reported per token id.
NO_TOKENS = {
    "test_a_beam_search_is_charged_what_the_engine_did",
    "test_each_choice_has_the_ids_of_its_own_prompt",
    "test_events_of_text",
    *("test_min_tokens_holds_every_end_back", "test_min_tokens_holds_stop_token_ids_back"),
    "test_penalties_reach_the_engine",
    TAKES_IDS,
    "test_special_tokens_can_be_shown",
    "test_stop_token_ids",
    "test_the_ids_of_a_chats_prompt_stand_beside_its_choices",
    "test_token_ids_can_be_returned",
    "test_truncate_prompt_tokens_keeps_the_end",
    "test_truncation_side_says_what_goes",
}
# Tests of parameters that llmapi has no input for: the gateway must refuse these requests. All
# other tests left out in this mode need Triton's metrics.
REFUSED = {
    *("test_a_schema_beside_json_object_holds", "test_json_object", "test_structured_outputs"),
    "test_a_schema_that_the_model_breaks_alone_is_always_met",
    *("test_bad_words_never_appear", "test_bad_words_never_appear_behind_a_space"),
    *("test_beam_search_finds_the_likeliest", "test_logit_bias_forbids_and_forces_tokens"),
    *("test_ignore_eos_goes_on_to_the_limit", "test_min_tokens_holds_the_end_back"),
    *("test_repetition_penalty", "test_events_of_a_forced_call", "test_parse_and_stream_agree"),
    *("test_parse_gives_the_model_asked_for", "test_parse_of_an_answer_cut_by_length_raises"),
}
SKIPPED: dict[str, set[str]] = {
    "ensemble": NO_TOKENS
    | {
        "test_no_character_is_ever_broken",
        "test_several_choices_are_numbered_and_drawn_apart",
        "test_wild_sampling_never_shows_a_replacement_character",
        "test_structured_outputs",
    },
    "bls": NO_TOKENS - {"test_events_of_text"} | {"test_beam_search_finds_the_likeliest"},
    "llmapi": NO_TOKENS - {TAKES_IDS} | REFUSED | {"test_metrics"},
    "llmapi-1.3": set(),
    "llmapi-1.2": set(),
}


@pytest.mark.slow
@pytest.mark.parametrize("mode", SKIPPED)
def test_the_openai_tests_through(mode: str, tmp_path: Path) -> None:
    files = [str(TESTS / name) for name in FILES[mode]]
    report, folder = tmp_path / "report.xml", tmp_path / "run"
    # The outer pytest run owns the cache folder, so the inner one must not use it.
    options = ["-q", "-p", "no:cacheprovider", f"--triton-mode={mode}", f"--junitxml={report}"]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", *options, f"--basetemp={folder}", *files],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        cwd=TESTS.parent,
    )
    if run.returncode:
        logs = [*folder.glob("*/*/state/logs/triton.log"), *folder.glob("*/*/stderr.log")]
        told = "".join(log.read_text() for log in logs)
        if mode == "bls" and (death := next((death for death in DEATHS if death in told), None)):
            pytest.skip(f"Triton died under the BLS model: {death}")
        pytest.fail(run.stdout[-5000:] + run.stderr[-2000:] + told[-3000:])
    skipped = {
        case.attrib["name"].partition("[")[0]
        for case in ElementTree.parse(report).iter("testcase")
        if case.find("skipped") is not None
    }
    assert skipped == SKIPPED[mode]

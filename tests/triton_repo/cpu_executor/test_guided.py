"""Guided decoding in the CPU executor, with the demo model and its byte-level tokenizer."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from tokenizers import Tokenizer

from tests.support.executor_client import Output, gather, request, run, start, start_golden
from triton_repo.cpu_executor import bindings as trtllm
from triton_repo.cpu_executor import synthetic
from triton_repo.cpu_executor.engine import build
from triton_repo.cpu_executor.enums import FinishReason
from triton_repo.cpu_executor.guide import GuideError
from triton_repo.cpu_executor.guide_compiler import GuideCompiler

MODEL = Path(__file__).parents[3] / "demo" / "model"
ROOT = MODEL.parent.parent
BACKENDS = trtllm.GuidedDecodingConfig.GuidedDecodingBackend
GuideType = trtllm.GuidedDecodingParams.GuideType
END_ID = 2
COUNT = 100
STEP = "Encountered an error in forwardAsync function: "
# llguidance refuses this regex during the output, once it exceeds its limit of states.
TOO_COMPLEX = "((((a{1,100}){1,100}){1,100}){1,100}){1,100}"
# A guide that takes hundreds of milliseconds to compile.
HEAVY = json.dumps({"enum": [f"value number {i}" for i in range(60_000)]})


class City(BaseModel):
    """A schema that the demo model has never seen."""

    model_config = ConfigDict(extra="forbid", strict=True)

    name: str = Field(max_length=12)
    kind: Literal["town", "capital"]
    people: int = Field(ge=1, le=9999)
    rivers: list[Literal["Rhine", "Seine"]] = Field(max_length=2)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    assert tokenizer.token_to_id("<|im_end|>") == END_ID
    return tokenizer


@pytest.fixture(scope="module")
def prompt(tokenizer: Tokenizer) -> list[int]:
    text = "<|im_start|>user\nTell me about Paris.<|im_end|>\n<|im_start|>assistant\n"
    return [int(i) for i in tokenizer.encode(text).ids]


def config(**more: Any) -> trtllm.GuidedDecodingConfig:
    tokenizer_str = (MODEL / "tokenizer.json").read_text()
    values = {"backend": BACKENDS.XGRAMMAR, "tokenizer_str": tokenizer_str}
    return trtllm.GuidedDecodingConfig(**values | {"stop_token_ids": [END_ID]} | more)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(MODEL, tmp_path_factory.mktemp("engine"), max_batch_size=128)


@pytest.fixture(scope="module")
def executor(engine: Path) -> Iterator[trtllm.Executor]:
    with start(engine, guided_decoding_config=config()) as executor:
        yield executor


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> Iterator[GuideCompiler]:
    compiler = GuideCompiler(config(), tokenizer.get_vocab_size())
    yield compiler
    compiler.close()


@pytest.fixture
def ask(executor: trtllm.Executor, prompt: list[int]) -> Any:
    def ask(*args: Any, **more: Any) -> Output:
        (output,) = run(executor, guided(prompt, *args, **more))
        return output

    return ask


def guided(
    prompt: list[int],
    kind: GuideType | None = None,
    guide: str | None = None,
    max_tokens: int = 100,
    **more: Any,
) -> trtllm.Request:
    """Return a streaming request that samples at temperature 1 from all allowed tokens."""
    params = None if kind is None else trtllm.GuidedDecodingParams(kind, guide)
    values = {"end_id": END_ID, "top_p": 1.0, "temperature": 1.0, "seed": 1}
    return request(prompt, max_tokens, **values | more, guided_decoding_params=params)


def texts(output: Output, tokenizer: Tokenizer, count: int = 1) -> list[str]:
    assert output.error is None, output.error
    # Special tokens must be visible in the texts.
    return [tokenizer.decode(output.tokens(i), skip_special_tokens=False) for i in range(count)]


def reasons(output: Output) -> set[FinishReason]:
    return {r.finish_reasons[0] for r in output.results if r.is_sequence_final}


def is_city(text: str) -> bool:
    try:
        City.model_validate_json(text)
    except ValidationError:
        return False
    return True


@pytest.mark.slow
def test_a_schema_that_the_model_breaks_is_met_every_time(ask: Any, tokenizer: Tokenizer) -> None:
    free = texts(ask(num_return_sequences=COUNT), tokenizer, COUNT)
    assert sum(map(is_city, free)) < COUNT / 2
    schema = json.dumps(City.model_json_schema())
    output = ask(GuideType.JSON_SCHEMA, schema, 200, num_return_sequences=COUNT)
    met = texts(output, tokenizer, COUNT)
    assert [text for text in met if not is_city(text)] == []
    assert reasons(output) == {FinishReason.END_ID}
    assert len(set(met)) > COUNT / 10


@pytest.mark.parametrize(
    ("kind", "guide", "pattern"),
    [
        (GuideType.REGEX, r"(red|green): \d{2,4}[.!]", r"(red|green): [0-9]{2,4}[.!]"),
        (GuideType.REGEX, r"^\w{3}$", r"[A-Za-z0-9_]{3}"),
        (GuideType.REGEX, "", ""),
        (GuideType.REGEX, "a/b", "a/b"),
        (GuideType.EBNF_GRAMMAR, 'root ::= "yes" | "no" | "é😀"', "yes|no|é😀"),
        (
            GuideType.EBNF_GRAMMAR,
            'root ::= ("(" a ")"){1,3}\na ::= "x"{1,4} "y"',
            r"(\(x{1,4}y\)){1,3}",
        ),
        # Text that spells a special token must stay text.
        (GuideType.EBNF_GRAMMAR, 'root ::= "<|im_start|>"', r"<\|im_start\|>"),
        (GuideType.JSON_SCHEMA, '{"const": "<|im_start|>"}', r'"<\|im_start\|>"'),
        (GuideType.JSON_SCHEMA, '{"enum": ["a", 1, null]}', '"a"|1|null'),
        (GuideType.JSON_SCHEMA, '{"type": "boolean"}', "true|false"),
    ],
)
def test_every_guide_is_followed_to_its_end(
    ask: Any, tokenizer: Tokenizer, kind: GuideType, guide: str, pattern: str
) -> None:
    output = ask(kind, guide, 200, num_return_sequences=8)
    assert reasons(output) == {FinishReason.END_ID}
    for text in texts(output, tokenizer, 8):
        assert re.fullmatch(pattern, text), text


@pytest.mark.parametrize("favourite", ["{}", "[]", "1"])
def test_json_is_an_object_or_an_array(
    ask: Any, executor: trtllm.Executor, tokenizer: Tokenizer, favourite: str
) -> None:
    bias = np.zeros(tokenizer.get_vocab_size(), np.float32)
    bias[[tokenizer.token_to_id(character) for character in favourite]] = 1000
    output = ask(GuideType.JSON, embedding_bias=bias, top_p=None)
    (text,) = texts(output, tokenizer)
    assert text == favourite or (favourite == "1" and text[0] in "{[")


def test_the_backend_llguidance_takes_lark(
    engine: Path, prompt: list[int], tokenizer: Tokenizer
) -> None:
    lark = 'start: "<" number ">"\nnumber: %json {"type": "integer", "minimum": 7, "maximum": 8}'
    guides = config(backend=BACKENDS.LLGUIDANCE)
    with start(engine, guided_decoding_config=guides) as executor:
        asked = [guided(prompt, GuideType.EBNF_GRAMMAR, lark, seed=i) for i in range(4)]
        outputs = run(executor, *asked)
    assert {texts(output, tokenizer)[0] for output in outputs} <= {"<7>", "<8>"}


def test_streamed_or_not_and_again_the_output_is_the_same(ask: Any, tokenizer: Tokenizer) -> None:
    schema = json.dumps(City.model_json_schema())
    # The second and third request find the prompt's blocks in the KV cache.
    streamed, again = (ask(GuideType.JSON_SCHEMA, schema) for _ in range(2))
    whole = ask(
        GuideType.JSON_SCHEMA, schema, streaming=False, exclude_input_from_output=True
    ).tokens()
    assert is_city(*texts(streamed, tokenizer))
    assert streamed.tokens() == again.tokens() == whole
    assert all(len(r.output_token_ids[0]) == 1 for r in streamed.results[:-1])
    assert streamed.last.output_token_ids == [[]]


def test_neighbours_do_not_notice(
    executor: trtllm.Executor, engine: Path, prompt: list[int]
) -> None:
    asked = [guided(prompt, max_tokens=20, seed=seed) for seed in range(4)]
    with start(engine) as unguided:
        alone = [output.tokens() for output in run(unguided, *asked)]
    mixed = [guided(prompt, GuideType.REGEX, "[a-z]{30}", 20), *asked]
    assert [output.tokens() for output in run(executor, *mixed)[1:]] == alone


def test_a_paused_request_goes_on_within_its_grammar(
    engine: Path, prompt: list[int], tokenizer: Tokenizer
) -> None:
    policy = trtllm.CapacitySchedulerPolicy.MAX_UTILIZATION
    limits: dict[str, Any] = {
        "scheduler_config": trtllm.SchedulerConfig(policy),
        "kv_cache_config": trtllm.KvCacheConfig(max_tokens=5 * 64),
        "enable_chunked_context": True,
        "guided_decoding_config": config(),
    }
    pattern = "[a-z]{300}"
    with start(engine, **limits) as executor:
        asked = [guided(prompt, GuideType.REGEX, pattern, 200, seed=i) for i in range(4)]
        outputs = run(executor, *asked)
        stats = executor.get_latest_iteration_stats()
    assert sum(s.inflight_batching_stats.num_paused_requests for s in stats) > 0
    for output in outputs:
        assert re.fullmatch("[a-z]{200,300}", *texts(output, tokenizer))


def test_only_an_end_may_follow_a_complete_grammar(ask: Any, tokenizer: Tokenizer) -> None:
    # Try the tokenizer's end id, none, and an end id that is a letter of the text.
    letter = tokenizer.token_to_id("e")
    bias = np.zeros(tokenizer.get_vocab_size(), np.float32)
    bias[[letter, END_ID]] = 1000
    for end_id in (END_ID, None, -1, letter):
        output = ask(GuideType.REGEX, "[a-f]{6}", end_id=end_id, embedding_bias=bias)
        assert reasons(output) == {FinishReason.END_ID}
        assert re.fullmatch("[a-f]{6}", *texts(output, tokenizer))
        assert letter not in output.tokens() or end_id != letter


def test_min_tokens_holds_the_end_back_until_the_grammar_needs_it(
    ask: Any, tokenizer: Tokenizer
) -> None:
    bias = np.zeros(tokenizer.get_vocab_size(), np.float32)
    bias[END_ID] = 1000
    free: dict[str, Any] = {"embedding_bias": bias, "min_tokens": 10}
    for end_id in (END_ID, None):
        long = ask(GuideType.EBNF_GRAMMAR, 'root ::= "a"*', end_id=end_id, **free)
        assert len(long.tokens()) == 10
        assert reasons(long) == {FinishReason.END_ID}
        short = ask(GuideType.EBNF_GRAMMAR, 'root ::= "a" "b"', end_id=end_id, **free)
        assert texts(short, tokenizer) == ["ab"]
        assert reasons(short) == {FinishReason.END_ID}


def test_stop_words_end_a_guided_output(ask: Any, tokenizer: Tokenizer) -> None:
    seven = tokenizer.token_to_id("7")
    bias = np.zeros(tokenizer.get_vocab_size(), np.float32)
    bias[seven] = 1000
    output = ask(
        GuideType.REGEX, "[0-9]{50}", stop_words=[[seven, seven]], embedding_bias=bias, top_p=None
    )
    assert output.tokens() == [seven, seven]
    assert reasons(output) == {FinishReason.STOP_WORDS}


def test_the_grammar_is_stronger_than_bans_and_counts_for_log_probs(
    ask: Any, tokenizer: Tokenizer
) -> None:
    seven = tokenizer.token_to_id("7")
    output = ask(GuideType.REGEX, "7", bad_words=[[seven]], return_log_probs=True)
    assert output.tokens() == [seven]
    # Only one token was allowed, so its probability is 1.
    assert output.last.log_probs == [[0.0]]


@pytest.mark.parametrize(
    ("kind", "guide", "text"),
    [
        (GuideType.JSON_SCHEMA, "{", "json_schema: Expecting property name"),
        (GuideType.JSON_SCHEMA, '{"type": "foo"}', "Invalid type: foo"),
        (GuideType.JSON_SCHEMA, "false", "schema is false"),
        (GuideType.JSON_SCHEMA, "[1]", "schema must be an object or boolean"),
        (GuideType.JSON_SCHEMA, '{"$ref": "http://localhost/x"}', "http://localhost/x"),
        (GuideType.JSON_SCHEMA, "[" * 100_000, "recursion"),
        (GuideType.REGEX, "(", "regex: invalid regex"),
        (GuideType.REGEX, r"(?=a)b", "look-around"),
        (GuideType.REGEX, "[a&&b]", "regex: there is no token that it allows"),
        (GuideType.EBNF_GRAMMAR, "root ::= x", 'line 1, column 10: rule "x" is not defined'),
        (GuideType.EBNF_GRAMMAR, "root ::= root", "there is no token that it allows"),
        (GuideType.EBNF_GRAMMAR, 'start: "a"', "ebnf_grammar: EBNF error at line 1, column 6"),
        (GuideType.EBNF_GRAMMAR, f'root ::= "{"ab" * 40_000}"', "it is too large"),
    ],
)
def test_a_bad_guide_ends_its_step(ask: Any, kind: GuideType, guide: str, text: str) -> None:
    output = ask(kind, guide)
    assert not output.results
    assert output.error is not None
    assert output.error.startswith(f"{STEP}Invalid guide of type {kind.name.lower()}: ")
    assert text in output.error
    assert "\n" not in output.error
    assert "backtrace" not in output.error


def test_a_bad_guide_ends_all_that_are_active(
    executor: trtllm.Executor, prompt: list[int], tokenizer: Tokenizer
) -> None:
    """Check that a guide that fails to compile ends all active requests.

    TensorRT-LLM compiles guides inside the step of the batch, so a failure ends the batch.
    """
    (running,) = executor.enqueue_requests([guided(prompt, max_tokens=1900, end_id=None)])
    begun = executor.await_responses(running, 30.0)
    (bad,) = executor.enqueue_requests([guided(prompt, GuideType.JSON_SCHEMA, '{"type": "foo"}')])
    outputs = gather(executor, [running, bad])
    assert begun
    assert outputs[0].error is not None
    assert outputs[0].error == outputs[1].error
    assert outputs[0].error.startswith(f"{STEP}Invalid guide of type json_schema: ")
    # The executor then serves the next request.
    assert texts(run(executor, guided(prompt, GuideType.REGEX, "ab"))[0], tokenizer) == ["ab"]


def test_xgrammar_passes_over_keywords_that_llguidance_refuses(
    ask: Any, engine: Path, prompt: list[int], tokenizer: Tokenizer
) -> None:
    schema = '{"const": 1, "contentMediaType": "a", "not": {}}'
    assert texts(ask(GuideType.JSON_SCHEMA, schema), tokenizer) == ["1"]
    with start(engine, guided_decoding_config=config(backend=BACKENDS.LLGUIDANCE)) as executor:
        (output,) = run(executor, guided(prompt, GuideType.JSON_SCHEMA, schema))
    assert output.error is not None
    assert "Unimplemented keys" in output.error


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from([GuideType.JSON_SCHEMA, GuideType.REGEX, GuideType.EBNF_GRAMMAR]),
    st.text() | st.text(st.sampled_from('root::= \n"a\\/{}[](),|*+.%$')),
)
def test_any_text_is_a_guide_or_is_refused(
    compiler: GuideCompiler, kind: GuideType, text: str
) -> None:
    params = trtllm.GuidedDecodingParams(kind, text)
    error = compiler.compile(params).exception(timeout=60)
    assert error is None or isinstance(error, GuideError)


def test_a_grammar_that_grows_too_complex_ends_its_own_request(
    executor: trtllm.Executor, prompt: list[int]
) -> None:
    good = guided(prompt, GuideType.REGEX, "[a-z]{300}", 60)
    bad = guided(prompt, GuideType.REGEX, TOO_COMPLEX, 60, num_return_sequences=2)
    broken, whole = run(executor, bad, good)
    assert broken.error is not None
    assert broken.error.startswith("Guided decoding failed: ")
    assert whole.error is None
    assert len(whole.tokens()) == 60


def test_a_heavy_guide_does_not_hold_up_the_others(
    executor: trtllm.Executor, prompt: list[int], tokenizer: Tokenizer
) -> None:
    (light,) = executor.enqueue_requests([guided(prompt, max_tokens=1900, end_id=None)])
    executor.await_responses(light, 30.0)
    (heavy,) = executor.enqueue_requests([guided(prompt, GuideType.JSON_SCHEMA, HEAVY, 30)])
    started, meanwhile = time.monotonic(), 0
    while executor.get_num_responses_ready(heavy) == 0:
        meanwhile += len(executor.await_responses(light, 30.0))
    seconds = time.monotonic() - started
    executor.cancel_request(light)
    output = gather(executor, [light, heavy])[1]
    assert texts(output, tokenizer)[0].startswith('"value number ')
    assert seconds > 0.05, "not heavy enough to show anything"
    assert meanwhile > 10


def test_a_cancelled_request_does_not_wait_for_its_guide(
    executor: trtllm.Executor, prompt: list[int]
) -> None:
    heavy = [guided(prompt, GuideType.JSON_SCHEMA, HEAVY) for _ in range(20)]
    ids = executor.enqueue_requests(heavy)
    started = time.process_time()
    for i in ids:
        executor.cancel_request(i)
    outputs = gather(executor, ids)
    assert {reason for output in outputs for reason in reasons(output)} == {FinishReason.CANCELLED}
    # Guides of requests that were cancelled before their start are not compiled.
    assert run(executor, guided(prompt, GuideType.REGEX, "a"))[0].error is None
    assert time.process_time() - started < 5


def test_what_cannot_be_set_up_is_named(engine: Path, tmp_path: Path) -> None:
    vocabulary = Tokenizer.from_file(str(MODEL / "tokenizer.json")).get_vocab_size()
    for wrong, text in (
        ({"tokenizer_str": None, "encoded_vocab": ["a"]}, "without tokenizer_str"),
        (
            {"stop_token_ids": [vocabulary]},
            f"stop_token_ids: {vocabulary} is not in the vocabulary",
        ),
    ):
        with pytest.raises(RuntimeError, match=text):
            start(engine, guided_decoding_config=config(**wrong))
    with pytest.raises(ValueError, match="loading tokenizer"):
        start(engine, guided_decoding_config=config(tokenizer_str="{}"))
    with pytest.raises(ValueError, match="vocab size too small"):
        start_golden(tmp_path, guided_decoding_config=config())


def test_the_tokenizer_says_what_ends_an_output_if_nobody_else_does(
    engine: Path, prompt: list[int], tokenizer: Tokenizer
) -> None:
    with start(engine, guided_decoding_config=config(stop_token_ids=None)) as executor:
        (output,) = run(executor, guided(prompt, GuideType.REGEX, "ab", end_id=None))
    assert texts(output, tokenizer) == ["ab"]
    assert reasons(output) == {FinishReason.END_ID}


def test_the_synthetic_engine_refuses_guides(tmp_path: Path) -> None:
    folder = synthetic.build(tmp_path, vocab_size=100)
    with start(folder, guided_decoding_config=config()) as executor:
        (output,) = run(executor, guided([1, 2], GuideType.JSON))
    assert output.error is not None
    assert "guided decoding is not supported by the synthetic engine" in output.error


def test_llguidance_is_only_loaded_where_guided_decoding_is_set_up(engine: Path) -> None:
    script = f"""
import sys
from triton_repo.cpu_executor import bindings as trtllm
from types import ModuleType
from triton_repo.cpu_executor.install import fill_tensorrt_llm
fill_tensorrt_llm(ModuleType("tensorrt_llm"))
trtllm.Executor({str(engine)!r}, trtllm.ModelType.DECODER_ONLY, trtllm.ExecutorConfig()).shutdown()
assert "llguidance" not in sys.modules
"""
    environment = {"PYTHONPATH": str(ROOT), "PATH": ""}
    subprocess.run([sys.executable, "-c", script], check=True, env=environment, timeout=60)

"""Text mode in detail: the text sent for a prompt, and what is read from text responses."""

from __future__ import annotations

import struct
from array import array
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from tritonclient.grpc import model_config_pb2
from tritonclient.grpc import service_pb2 as pb

from gateway.deltas import TokenDelta
from gateway.errors import EngineError, EngineUnavailable, UnsupportedParameter
from gateway.generation.engine_request import TextPrompt
from gateway.generation.options import GenerationParams, Options
from gateway.parsers.message import MessageForm
from gateway.parsers.reasoning import Tags
from gateway.parsers.tools.forced import ForcedCall
from gateway.pipeline.capabilities import check_supported
from gateway.pipeline.text_prompt import fit_text, text_prompt
from gateway.tokenization.piece_stream import PieceStream
from gateway.tokenization.prompts import Prompts
from gateway.triton.model_capabilities import ModelCapabilities, TextModel, read_capabilities
from gateway.triton.names import CORE, TEXT, LogicalInput, read_inputs
from gateway.triton.selection import ModelPreferences, ModelSelection, select_model
from gateway.triton.tensors import generation_request, token_delta
from gateway.triton.text_tensors import TextReader, text_request
from tests.support.generations import generation


def llama_like() -> Tokenizer:
    """Return a tokenizer with a token per byte, and <s> before a text with special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>", "<|eot|>"])
    bos = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", bos)]
    )
    return tokenizer


TOKENIZER = llama_like()
BOS, EOS, EOT = (TOKENIZER.token_to_id(token) for token in ("<s>", "</s>", "<|eot|>"))


@pytest.fixture
def prompts() -> Prompts:
    return Prompts(TOKENIZER, {"bos_token": "<s>", "eos_token": "</s>"}, [EOS, EOT])


def ids_of(text: str, *, special: bool) -> array[int]:
    return array("i", TOKENIZER.encode(text, add_special_tokens=special).ids)


@pytest.mark.parametrize("adds", [True, False])
@pytest.mark.parametrize("text", ["<s>Hello", "<s>[INST] <s>", "<s>"])
async def test_a_chat_has_the_beginning_that_its_template_wrote_once(
    prompts: Prompts, text: str, adds: bool
) -> None:
    sent, ids = await fit_text(
        prompts, text, TextModel(adds_special_tokens=adds), prompts.encode, chat=True
    )
    assert ids == ids_of(text, special=False) == ids_of(sent, special=adds)
    assert sent == (text.removeprefix("<s>") if adds else text)


@pytest.mark.parametrize("adds", [True, False])
async def test_a_completion_has_what_the_tokenizer_adds(prompts: Prompts, adds: bool) -> None:
    sent, ids = await fit_text(
        *(prompts, "Hello", TextModel(adds_special_tokens=adds), prompts.encode), chat=False
    )
    assert ids == ids_of("Hello", special=True) == ids_of(sent, special=adds)
    assert ids.count(BOS) == 1


async def test_what_cannot_be_avoided_is_counted(prompts: Prompts) -> None:
    sent, ids = await fit_text(
        *(prompts, "Hello", TextModel(adds_special_tokens=True), prompts.encode), chat=True
    )
    assert (sent, ids) == ("Hello", ids_of("Hello", special=True))


async def test_words_in_place_of_ids(prompts: Prompts) -> None:
    options = Options(seed=1, params=GenerationParams(stop=("a", "b")), bad_words=("c",))
    text = await text_prompt(
        prompts, "x", ids_of("<s>x", special=False), TextModel(), options, restates=True
    )
    assert text == TextPrompt("x", ("a", "b", "<|eot|>"), ("c", " c"), (), "x")
    held = Options(
        seed=1,
        params=GenerationParams(min_tokens=3, stop=("a",)),
        ignore_eos=True,
    )
    shown = TextModel(skips_special_tokens=False)
    text = await text_prompt(
        prompts, "x", ids_of("<s>x", special=False), shown, held, restates=True
    )
    assert text == TextPrompt("x", restated="<s>x")
    unread = await text_prompt(prompts, "x", [1], shown, held, restates=False)
    assert unread == TextPrompt("x")


async def test_a_bias_goes_along_only_as_words_of_one_token(prompts: Prompts) -> None:
    """A bias is refused if the model would encode its word with <s>, which it would bias, too."""
    options = Options(
        seed=1,
        params=GenerationParams(logit_bias=((ids_of("a", special=False)[0], 5.0),)),
    )
    with pytest.raises(UnsupportedParameter) as caught:
        await text_prompt(prompts, "x", [1], TextModel(), options, restates=True)
    assert caught.value.param == "logit_bias"


@pytest.mark.parametrize(
    ("form", "skips", "served"),
    [
        (MessageForm(tools="mistral"), True, False),
        (MessageForm(tools="mistral"), False, True),
        (MessageForm(tools="mistral", guided=ForcedCall()), True, True),
        (MessageForm(tools="hermes"), True, True),
        (MessageForm(), True, True),
    ],
)
async def test_tools_need_marks_that_are_shown(
    form: MessageForm, skips: bool, served: bool
) -> None:
    tokenizer = llama_like()
    tokenizer.add_special_tokens(["[TOOL_CALLS]"])
    prompts = Prompts(tokenizer, {"eos_token": "</s>"}, [EOS])
    model = TextModel(skips_special_tokens=skips)
    options = Options(seed=1, params=GenerationParams(message=form))
    if served:
        assert (await text_prompt(prompts, "x", [1], model, options, restates=True)).text == "x"
        return
    with pytest.raises(UnsupportedParameter) as caught:
        await text_prompt(prompts, "x", [1], model, options, restates=True)
    assert caught.value.param == "tools"


def config_of(names: dict[LogicalInput, tuple[str, ...]], **extra: Any) -> Any:
    config = model_config_pb2.ModelConfig(**extra)
    for known in names.values():
        config.input.add(name=known[0], data_type="TYPE_INT32")
    config.output.add(name="sequence_length")
    return config


def capabilities(
    *, decoupled: bool = True, drop: tuple[LogicalInput, ...] = ()
) -> ModelCapabilities:
    names = {logical: known for logical, known in CORE.items() if logical not in drop}
    config = config_of(names)
    config.model_transaction_policy.decoupled = decoupled
    return read_capabilities("m", config, max_seq_len=64, vocab_size=256)


def response(final: bool, *texts: str | bytes) -> pb.ModelInferResponse:
    message = pb.ModelInferResponse()
    message.parameters["triton_final_response"].bool_param = final
    if texts:
        raw = [text.encode() if isinstance(text, str) else text for text in texts]
        message.outputs.add(name="text_output", datatype="BYTES", shape=[len(raw)])
        message.raw_output_contents.append(
            b"".join(struct.pack("<I", len(text)) + text for text in raw)
        )
    return message


def read(model: TextModel, *responses: pb.ModelInferResponse) -> tuple[list[str], int]:
    reader = TextReader(capabilities(), model, TextPrompt("x"))
    deltas = [reader.delta(one) for one in responses]
    assert [delta.final for delta in deltas] == [False] * (len(deltas) - 1) + [True]
    return [delta.text or "" for delta in deltas], sum(delta.tokens or 0 for delta in deltas)


@pytest.mark.parametrize(
    ("responses", "tokens"),
    [
        ([response(False, "a"), response(True, "b")], 2),  # ended by max_tokens
        ([response(False, "a"), response(True, "")], 1),  # an ensemble after the end token
        # a BLS model after the end token
        ([response(False, "a"), response(False, ""), response(True)], 1),
        ([response(False, "a"), response(True)], 1),
        # a hidden special token
        ([response(False, ""), response(False, "b"), response(True, "")], 2),
    ],
)
def test_tokens_are_counted_by_responses(
    responses: list[pb.ModelInferResponse], tokens: int
) -> None:
    assert read(TextModel(), *responses)[1] == tokens


def test_text_so_far_becomes_text_that_is_new() -> None:
    texts = ["a", "a\ufffd", "a\ufffd", "a🦉", "a🦉b\ufffd"]
    responses = [*(response(False, text) for text in texts), response(True)]
    found, tokens = read(TextModel(accumulates=True), *responses)
    assert found == ["a", "", "", "🦉", "b", ""]
    assert tokens == len(texts)


def test_past_a_stop_word_texts_are_empty() -> None:
    responses = [response(False, "ab"), response(False, ""), response(False, ""), response(True)]
    assert read(TextModel(accumulates=True), *responses)[0] == ["ab", "", "", ""]


@given(st.text(), st.integers(0, 3))
def test_any_text_comes_as_it_was_cut(text: str, width: int) -> None:
    pieces = [text[i : i + width + 1] for i in range(0, len(text), width + 1)]
    found, _ = read(TextModel(), *(response(False, piece) for piece in pieces), response(True))
    assert "".join(found) == text


def test_bytes_that_are_no_text_do_no_harm() -> None:
    assert read(TextModel(), response(False, b"\xff"), response(True))[0] == ["\ufffd", ""]


def test_a_prompt_that_comes_back_is_taken_off() -> None:
    whole = capabilities(decoupled=False, drop=("exclude_prompt",))
    reader = TextReader(whole, TextModel(), TextPrompt("<s>x", restated="x"))
    delta = reader.delta(response(True, "xyz\ufffd"))
    assert (delta.text, delta.final, delta.tokens) == ("yz", True, None)
    with pytest.raises(EngineError, match="does not begin with the prompt"):
        reader.delta(response(True, "other"))


@pytest.mark.parametrize(
    ("fields", "counts", "finish", "tokens"),
    [
        ({"end_id": 1}, [1, 1, 0], "stop", 2),
        ({"end_id": 1}, [1, 1, 1, 1, 1], "length", 5),
        # without an end id or stop string, only max_tokens can have ended the text
        ({"end_id": None}, [1, 1, 1, 1], "length", 5),
        ({"end_id": None, "text": TextPrompt("x", stop=("s",))}, [1, 1], "stop", 2),
        ({"end_id": 1}, [None], "stop", 1),
        ({"end_id": 1, "max_tokens": 1}, [None], "length", 1),
    ],
)
def test_finish_reason_and_usage(
    fields: dict[str, Any], counts: list[int | None], finish: str, tokens: int
) -> None:
    stream = PieceStream(TOKENIZER, generation(**fields))
    for position, count in enumerate(counts):
        final = position == len(counts) - 1
        delta = stream.to_text(TokenDelta([], final, text="a" if count != 0 else "", tokens=count))
    assert (delta.finish, delta.tokens) == (finish, tokens)


def test_a_stop_string_over_two_texts() -> None:
    stream = PieceStream(TOKENIZER, generation(stop=("END",), end_id=1))
    deltas = [stream.to_text(TokenDelta([], False, text=text, tokens=1)) for text in ("a E", "NDb")]
    assert [(delta.text, delta.finish) for delta in deltas] == [("a ", None), ("", "stop")]


async def test_stop_strings_behind_reasoning_are_not_sent(prompts: Prompts) -> None:
    for form, sent in ((None, True), (MessageForm(reasoning=Tags("<t>", "</t>")), False)):
        options = Options(seed=1, params=GenerationParams(stop=("a",), message=form))
        text = await text_prompt(prompts, "x", [1], TextModel(), options, restates=True)
        assert ("a" in text.stop) is sent


def test_zeros_for_outputs_that_were_not_asked_for() -> None:
    """Outputs of zeros, which releases v0.10 to v0.13 send unasked, are ignored."""
    message = response(True)
    for name, datatype, raw in (
        ("output_ids", "INT32", array("i", [7, 8])),
        ("sequence_length", "INT32", array("i", [2])),
        ("cum_log_probs", "FP32", array("f", [0])),
        ("output_log_probs", "FP32", array("f", [0])),
        ("context_logits", "FP32", array("f", [0])),
        ("generation_logits", "FP32", array("f", [0])),
        ("batch_index", "INT32", array("i", [0])),
    ):
        message.outputs.add(name=name, datatype=datatype, shape=[1, 1, 1])
        message.raw_output_contents.append(raw.tobytes())
    assert token_delta(message, capabilities(), generation()) == TokenDelta([7, 8], True)


def test_the_prompts_ids_are_taken_off_where_they_come_back() -> None:
    message = response(True)
    message.outputs.add(name="output_ids", datatype="INT32", shape=[1, 1, 3])
    message.raw_output_contents.append(array("i", [1, 2, 9]).tobytes())
    whole = capabilities(decoupled=False, drop=("exclude_prompt",))
    assert token_delta(message, whole, generation()).ids == [9]
    # A model that is not decoupled sends one response, so the response is final without a marker.
    del message.parameters["triton_final_response"]
    assert token_delta(message, whole, generation()).final


class Models:
    """A fake server that knows the configs of its models."""

    def __init__(self, **configs: Any) -> None:
        self.configs = configs

    async def model_ready(self, model: str) -> bool:
        return model in self.configs

    async def model_config(self, model: str) -> Any:
        return self.configs[model]


def lora_bls(*, reshape: bool, guides: bool) -> Any:
    config = config_of(TEXT, backend="python")
    for tensor in list(config.input):
        if tensor.name == "lora_weights":
            tensor.data_type = model_config_pb2.TYPE_FP16
        elif tensor.name == "lora_task_id" and reshape:
            tensor.reshape.shape.extend([])
            tensor.reshape.SetInParent()
        elif tensor.name == "guided_decoding_guide" and not guides:
            config.input.remove(tensor)
    return config


async def chosen(server: Models, **wanted: Any) -> ModelSelection:
    fields = {"core": "tensorrt_llm", "max_seq_len": 64, "vocab_size": 256} | wanted
    return await select_model(server, ModelPreferences(**fields))


@pytest.mark.parametrize(
    ("reshape", "guides", "takes"),
    [(True, False, False), (True, True, True), (False, False, True)],
)
async def test_a_bls_model_that_loses_adapters_is_known(
    reshape: bool, guides: bool, takes: bool
) -> None:
    bls = lora_bls(reshape=reshape, guides=guides)
    choice = await chosen(Models(tensorrt_llm_bls=bls), mode="text")
    assert (choice.capabilities.lora_dtype is not None) is takes
    assert choice.capabilities.text is not None
    assert choice.capabilities.text.loses_lora is not takes


async def test_beams_of_an_engine_behind_a_bls_model_that_accumulates() -> None:
    bls, core = lora_bls(reshape=False, guides=False), config_of(CORE)
    bls.parameters["accumulate_tokens"].string_value = "true"
    core.parameters["max_beam_width"].string_value = "4"
    capabilities = (
        await chosen(Models(tensorrt_llm_bls=bls, tensorrt_llm=core), mode="text")
    ).capabilities
    check_supported(capabilities, Options(seed=1, beam_search=True), chat=False)
    with pytest.raises(UnsupportedParameter) as caught:
        check_supported(capabilities, Options(seed=1, beam_search=True, n=2), chat=False)
    assert "2 beams asked for; this engine allows 4, but 'tensorrt_llm_bls' with" in str(
        caught.value
    )


async def test_a_bls_model_without_its_core_is_taken_only_when_told() -> None:
    server = Models(tensorrt_llm_bls=lora_bls(reshape=False, guides=False))
    with pytest.raises(EngineUnavailable, match="but not its core model"):
        await chosen(server)
    choice = await chosen(server, mode="text")
    assert (choice.capabilities.model, choice.capabilities.stop) == ("tensorrt_llm_bls", None)


@pytest.mark.parametrize("period", [None, "${cancellation_check_period_ms}", "100"])
async def test_a_bls_model_that_does_not_look_for_its_callers_is_known(period: str | None) -> None:
    bls = lora_bls(reshape=False, guides=False)
    if period is not None:
        bls.parameters["cancellation_check_period_ms"].string_value = period
    choice = await chosen(Models(tensorrt_llm_bls=bls), mode="text")
    assert choice.capabilities.stoppable is (period == "100")
    assert (choice.warning is None) is choice.capabilities.stoppable


def ensemble() -> Any:
    config = config_of(TEXT, platform="ensemble")
    config.model_transaction_policy.decoupled = True
    config.ensemble_scheduling.step.add(model_name="core").input_map["input_ids"] = "ids"
    return config


async def test_of_two_text_models_the_one_that_can_be_stopped_is_taken() -> None:
    """The ensemble is chosen, because its core model can be stopped by request id."""
    bls = lora_bls(reshape=False, guides=False)
    server = Models(tensorrt_llm_bls=bls, ensemble=ensemble(), core=config_of(CORE))
    choice = await chosen(server, mode="text")
    assert (choice.capabilities.model, choice.warning) == ("ensemble", None)
    # Warn without a core model: cancelling the call does not reach a step that runs.
    del server.configs["core"]
    choice = await chosen(server, mode="text")
    assert choice.warning is not None


@pytest.mark.parametrize("backend", ["python", "tensorrtllm"])
async def test_a_model_in_python_is_not_told_which_outputs(backend: str) -> None:
    core = config_of(CORE, backend=backend)
    core.output.add(name="batch_index")
    capabilities = (await chosen(Models(tensorrt_llm=core))).capabilities
    request = pb.ModelInferRequest.FromString(
        generation_request(capabilities, generation(temperature=0)).data
    )
    named = {output.name for output in request.outputs}
    needed = {"output_ids", "sequence_length", "kv_cache_reused_blocks"}
    assert named == (set() if backend == "python" else needed)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("model", [TextModel(), TextModel(prefers_single_response=True)])
async def test_what_nobody_streams_is_asked_for_whole(
    prompts: Prompts, model: TextModel, stream: bool
) -> None:
    text = await text_prompt(
        prompts, "x", [1], model, Options(seed=1, stream=stream), restates=True
    )
    assert text.single_response is (model.prefers_single_response and not stream)
    stopped = Options(seed=1, stream=stream, params=GenerationParams(stop=("a",)))
    assert not (await text_prompt(prompts, "x", [1], model, stopped, restates=True)).single_response
    server = replace(capabilities(), inputs=read_inputs(config_of(TEXT), TEXT))
    greedy = generation(text=text, temperature=0)
    request = pb.ModelInferRequest.FromString(text_request(server, greedy, text).data)
    names = {tensor.name for tensor in request.inputs}
    assert ("stream" in names) is not text.single_response
    assert ("exclude_input_in_output" in names) is text.single_response


def test_a_whole_answer_and_its_end_apart() -> None:
    """BLS models end a response with an empty one."""
    reader = TextReader(capabilities(), TextModel(), TextPrompt("x", single_response=True))
    stream = PieceStream(TOKENIZER, generation(end_id=1))
    found = [stream.to_text(reader.delta(one)) for one in (response(False, "ab"), response(True))]
    assert [(delta.text, delta.tokens) for delta in found] == [("ab", 2), ("", 2)]
    assert found[-1].finish == "stop"


async def test_answers_that_may_begin_with_the_prompt_are_refused_at_the_start() -> None:
    names = {logical: known for logical, known in TEXT.items() if logical != "exclude_prompt"}
    with pytest.raises(EngineUnavailable, match="begin with the prompt is unknown"):
        await chosen(Models(ensemble=config_of(names)), mode="text")


@pytest.mark.parametrize(
    ("value", "inputs", "adds"),
    [
        (None, (), False),  # v0.9
        (None, ("DECODER_QUERY",), True),  # v0.11
        ("false", ("DECODER_QUERY",), False),
        ("true", (), True),
        ("${add_special_tokens}", ("DECODER_QUERY",), True),
    ],
)
async def test_special_tokens_by_default_and_as_told(
    value: str | None, inputs: tuple[str, ...], adds: bool
) -> None:
    before = model_config_pb2.ModelConfig()
    for name in inputs:
        before.input.add(name=name)
    if value is not None:
        before.parameters["add_special_tokens"].string_value = value
    server = Models(preprocessing=before, tensorrt_llm_bls=config_of(TEXT), tensorrt_llm=None)
    server.configs["tensorrt_llm"] = config_of(CORE)
    found = await chosen(server, mode="text")
    assert found.capabilities.text is not None
    assert found.capabilities.text.adds_special_tokens is adds


def test_an_engine_folder_that_is_not_named_is_not_the_current_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text('{"build_config": {"max_seq_len": 7}}')
    monkeypatch.chdir(tmp_path)
    assert capabilities().max_seq_len == 64


@pytest.mark.parametrize(
    ("file", "length", "block", "warned"),
    [
        (
            '{"pretrained_config": {"vocab_size": 9},'
            ' "build_config": {"max_seq_len": 7, "plugin_config": {"tokens_per_block": 32}}}',
            (7, 9),
            32,
            "",
        ),
        # v0.5 to v0.7: separate limits for input and output, and plugin_config beside
        # builder_config
        (
            '{"builder_config": {"max_input_len": 4, "max_output_len": 3, "vocab_size": 9},'
            ' "plugin_config": {"tokens_per_block": 32}}',
            (7, 9),
            32,
            "",
        ),
        ('{"build_config": {"max_seq_len": "7"}}', (64, 256), 64, "build_config.max_seq_len"),
        ("{", (64, 256), 64, "no JSON"),
    ],
)
def test_the_engine_s_limits_are_read_from_its_file_or_left_open(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    file: str,
    length: tuple[int, int],
    block: int,
    warned: str,
) -> None:
    (tmp_path / "config.json").write_text(file)
    config = config_of(CORE)
    config.parameters["gpt_model_path"].string_value = str(tmp_path)
    found = read_capabilities("m", config, max_seq_len=64, vocab_size=256)
    assert (found.max_seq_len, found.vocab_size) == length
    assert found.tokens_per_block == block
    assert bool(caplog.text) == bool(warned)
    assert warned in caplog.text

"""One request straight to Triton, told as the reference clients of tensorrtllm_backend tell it."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from adapters import convert, npy, peft
from adapters.adapter import Converted
from adapters.base_model import read_base_model
from adapters.errors import AdapterError
from gateway.errors import InvalidRequest
from gateway.tokenization.prompts import Prompts
from gateway.triton.client import Responses, TritonClient
from gateway.triton.direct import DirectModel, Reply, replies
from gateway.triton.names import Thing
from gateway.triton.request import RequestBuilder
from gateway.triton.tensors import with_weights, word_list
from gateway.triton.transport import Wire

_LOG_PROBS = ("cum_log_probs", "output_log_probs")
_STATISTICS = (
    "kv_cache_alloc_new_blocks",
    "kv_cache_reused_blocks",
    "kv_cache_alloc_total_blocks",
    "arrival_time_ns",
    "first_scheduled_time_ns",
    "first_token_time_ns",
    "last_token_time_ns",
    "acceptance_rate",
    "total_accepted_draft_tokens",
    "total_draft_tokens",
)
# What each request for an output makes the model send.
_ANSWERS: Mapping[Thing, tuple[str, ...]] = {
    "log_probs": _LOG_PROBS,
    "context_logits": ("context_logits",),
    "generation_logits": ("generation_logits",),
    "cache_stats": _STATISTICS,
}
_CORE_TOKENS, _TEXT_TOKENS = 16, 100

Say = Callable[[str], None]


@dataclass(frozen=True)
class Question:
    """What is asked.

    Attributes:
        text, prompt_ids: the prompt; ids are for the core model and win.
        tokenizer_dir: Hugging Face folder; for text to the core model it is needed.
        max_tokens: None is the default of the reference client, 16 for the core model, 100 else.
        scalars: numbers and truth values by what they mean, with the option that gave each.
        words: likewise stop and bad words, bias words and guides, each a list of texts.
        sequences: answers wanted; 1 unless `beam_width` is 1 too.
        stop_after_ms: when to stop it, 0 never; `by_cancel` cancels the RPC instead of asking.
        expected_ids: what must come out; `threshold` is the part that must be equal, 0 to 1.
        outputs: names of what to request; None is what the other options need.
    """

    model: str
    text: str
    prompt_ids: list[int] | None = None
    tokenizer_dir: Path | None = None
    request_id: str = ""
    max_tokens: int | None = None
    streaming: bool = False
    beam_width: int = 1
    sequences: int = 1
    end_id: int | None = None
    pad_id: int | None = None
    scalars: Mapping[Thing, tuple[str, float]] = field(default_factory=dict)
    words: Mapping[Thing, tuple[str, list[str]]] = field(default_factory=dict)
    bias_weights: list[float] | None = None
    exclude_input: bool = False
    stop_after_ms: int = 0
    by_cancel: bool = False
    lora_path: Path | None = None
    lora_task_id: int = 0
    outputs: list[str] | None = None
    expected_ids: list[int] | None = None
    threshold: float = 1.0
    overwrite: bool = False
    timeout_s: float | None = None
    verbose: bool = False


async def ask(url: str, wire: Wire, question: Question, say: Say) -> bool:
    """Sends it and tells the answer to `say` by lines; returns whether all went as expected.

    Raises GatewayError, with an option in it where that is to blame, and TimeoutError.
    """
    client = TritonClient(url, wire)
    try:
        model = await DirectModel.find(client, question.model)
        prompts = None
        if question.tokenizer_dir is not None:
            prompts = Prompts.load(question.tokenizer_dir)
        conversation = _Conversation(model, question, prompts, say)
        async with asyncio.timeout(question.timeout_s):
            return await conversation.run(client)
    finally:
        await client.close()


class _Conversation:
    def __init__(
        self, model: DirectModel, question: Question, prompts: Prompts | None, say: Say
    ) -> None:
        self._model = model
        self._question = question
        self._prompts = prompts
        self._say = say
        self._id = question.request_id or uuid.uuid4().hex
        self._cancelled = False
        self._prompt_ids: list[int] = []
        self._ids: dict[int, list[int]] = {}
        self._texts: dict[int, str] = {}
        self._failed = False

    async def run(self, client: TritonClient) -> bool:
        question = self._question
        self._check()
        request = self._request()
        lora = self._lora()
        if lora is not None:
            request.scalar("lora_task_id", question.lora_task_id or lora.task_id)
        message = request.request if lora is None else with_weights(request.request, lora)
        core = self._model
        if question.stop_after_ms and self._model.is_ensemble:
            # An ensemble has no `stop`, but its core model's request has the same id.
            core = await DirectModel.find(client, "tensorrt_llm")
        stream = await self._model.send(message)
        stopper = asyncio.create_task(self._stop(stream, core))
        began = time.monotonic()
        try:
            async for reply in replies(stream):
                self._take(reply, 1000 * (time.monotonic() - began))
        except asyncio.CancelledError:
            if not self._cancelled:
                raise
            self._say("Request is cancelled")
        else:
            if not self._failed:
                self._say("Got completed request")
        if stopper.done() or question.stop_after_ms == 0:
            await stopper
        else:
            stopper.cancel()
        stream.cancel()
        self._tell()
        return not self._failed and self._matches()

    def _check(self) -> None:
        model, question = self._model, self._question
        if question.streaming and not model.decoupled:
            raise InvalidRequest(f"--streaming: {model.name} is not decoupled.")
        if question.beam_width > 1 and question.sequences > question.beam_width:
            raise InvalidRequest("--num-return-sequences: at most --beam-width.")
        bls = model.takes_text and not model.is_ensemble
        if bls and question.sequences > 1:
            raise InvalidRequest(f"--num-return-sequences: {model.name} does not pass it on.")
        if bls and question.stop_after_ms and not question.by_cancel:
            raise InvalidRequest(
                f"--stop-after-ms: requests inside {model.name} have ids that nobody knows."
            )
        if model.takes_text and question.expected_ids is not None:
            raise InvalidRequest(f"--output-tokens-csv: {model.name} gives no ids.")
        if question.outputs is not None:
            needed = "text_output" if model.takes_text else "output_ids"
            if needed not in question.outputs:
                raise InvalidRequest(f"--requested-outputs: {needed} is needed.")
            if unknown := sorted(set(question.outputs) - model.outputs):
                raise InvalidRequest(f"--requested-outputs: {model.name} has no {unknown[0]}.")

    def _request(self) -> RequestBuilder:
        model, question = self._model, self._question
        build = model.request(self._id)
        tokens = question.max_tokens
        if model.takes_text:
            build.texts("prompt", [question.text])
            build.scalar("max_tokens", _TEXT_TOKENS if tokens is None else tokens)
        else:
            self._prompt_ids = self._encode()
            build.numbers("prompt", self._prompt_ids, len(self._prompt_ids))
            build.scalar("prompt_length", len(self._prompt_ids))
            build.scalar("max_tokens", _CORE_TOKENS if tokens is None else tokens)
        end_id = question.end_id
        if end_id is None and self._prompts is not None:
            end_id = next(iter(self._prompts.eos_ids), None)
        pad_id = end_id if question.pad_id is None else question.pad_id
        optional: dict[Thing, tuple[str, float]] = {}
        if end_id is not None:
            optional["end_id"] = ("--end-id", end_id)
        if pad_id is not None:
            optional["pad_id"] = ("--pad-id", pad_id)
        if question.streaming:
            optional["streaming"] = ("--streaming", True)
        if question.beam_width > 1:
            optional["beam_width"] = ("--beam-width", question.beam_width)
        if question.sequences > 1:
            optional["sequences"] = ("--num-return-sequences", question.sequences)
        if question.exclude_input:
            optional["exclude_prompt"] = ("--exclude-input-in-output", True)
        for thing, (option, value) in (optional | dict(question.scalars)).items():
            self._need(thing, option)
            build.scalar(thing, value)
        self._add_words(build)
        if question.lora_task_id and question.lora_path is None:
            self._need("lora_task_id", "--lora-task-id")
            build.scalar("lora_task_id", question.lora_task_id)
        for name in self._wanted():
            build.output(name)
        return build

    def _need(self, thing: Thing, option: str) -> None:
        if thing not in self._model.inputs:
            raise InvalidRequest(f"{option}: {self._model.name} has no input for it.")

    def _encode(self) -> list[int]:
        if self._question.prompt_ids is not None:
            return self._question.prompt_ids
        if self._prompts is None:
            raise InvalidRequest(
                f"--tokenizer-dir: {self._model.name} takes ids; a text needs the tokenizer."
            )
        ids: list[int] = self._prompts.tokenizer.encode(self._question.text).ids
        return ids

    def _add_words(self, build: RequestBuilder) -> None:
        question = self._question
        for thing, (option, words) in question.words.items():
            self._need(thing, option)
            if self._model.takes_text or thing in ("guide", "guide_type"):
                build.texts(thing, words)
            elif self._prompts is None:
                raise InvalidRequest(f"{option}: {self._model.name} needs --tokenizer-dir for it.")
            elif thing == "bias":
                raise InvalidRequest(f"{option}: only the text models take words.")
            else:
                ids = word_list(self._prompts.word_ids(tuple(words)))
                build.numbers(thing, ids, 2, len(ids) // 2)
        if question.bias_weights is not None:
            weights = question.bias_weights
            build.numbers("bias_weights", weights, len(weights))

    def _wanted(self) -> list[str]:
        if self._question.outputs is not None:
            return self._question.outputs
        names = ["text_output"] if self._model.takes_text else ["output_ids", "sequence_length"]
        for thing, answers in _ANSWERS.items():
            if thing in self._question.scalars:
                names += answers
        if self._question.sequences > 1:
            names.append("sequence_index")
        return [name for name in names if name in self._model.outputs]

    def _lora(self) -> Converted | None:
        question = self._question
        if question.lora_path is None:
            return None
        self._need("lora_weights", "--lora-path")
        places = [question.tokenizer_dir, Path(self._model.engine_dir or "/nonexistent")]
        folder = next((f for f in places if f is not None and (f / "config.json").exists()), None)
        if folder is None:
            raise InvalidRequest("--lora-path: name the base model's folder with --tokenizer-dir.")
        dtype = self._model.lora_dtype
        try:
            if (question.lora_path / npy.WEIGHTS).exists():
                return npy.read(question.lora_path, read_base_model(folder, (), dtype=dtype))
            adapter = peft.read(question.lora_path)
            # Whoever names both folders says that they belong together.
            names = (adapter.settings.base_model_name_or_path or "",)
            return convert.convert(adapter, read_base_model(folder, names, dtype=dtype))
        except AdapterError as error:
            raise InvalidRequest(f"--lora-path: {error}") from error

    async def _stop(self, stream: Responses, core: DirectModel) -> None:
        if not self._question.stop_after_ms:
            return
        await asyncio.sleep(self._question.stop_after_ms / 1000)
        if self._question.by_cancel:
            self._cancelled = True
            stream.cancel()
            return
        async for reply in replies(await core.send(core.stop(self._id))):
            if reply.error:
                self._fail(reply.error)
            else:
                self._say("Got cancellation response from server")

    def _take(self, reply: Reply, since_ms: float) -> None:
        if reply.error:
            self._fail(reply.error)
            return
        index = reply.array("sequence_index")
        first = 0 if index is None else int(index.reshape(-1)[0])
        question = self._question
        adds = question.streaming and question.beam_width == 1
        for beam, text in enumerate(reply.texts()):
            known = self._texts.get(first + beam, "") if adds and not question.overwrite else ""
            self._texts[first + beam] = known + text
            if question.verbose:
                self._say(f"[{since_ms:.1f} ms] {text!r}")
        for beam, ids in enumerate(reply.ids()):
            self._ids[first + beam] = (self._ids.get(first + beam, []) if adds else []) + ids
            if question.verbose and question.streaming:
                self._say(f"[{since_ms:.1f} ms] {ids}")
        for name in reply.names():
            if name in _LOG_PROBS:
                self._say(f"{name}: {reply.array(name)}")
            elif name.endswith("_logits"):
                array = reply.array(name)
                assert array is not None
                self._say(f"{name}.shape: {array.shape}")
            elif name in _STATISTICS:
                array = reply.array(name)
                assert array is not None
                self._say(f"{name}: {array.reshape(-1)[0]}")

    def _fail(self, error: str) -> None:
        self._failed = True
        self._say("Received an error from server:")
        self._say(error)

    def _tell(self) -> None:
        many = self._question.sequences > 1 and self._question.beam_width == 1
        for index, text in sorted(self._texts.items()):
            self._say(f"0 [{index}]: {text}" if len(self._texts) > 1 else f"0: {text}")
        if self._ids and self._prompts is not None:
            prompt = self._question.text
            if self._question.prompt_ids is not None:
                prompt = self._prompts.decode(self._prompt_ids)
            self._say(f"Input: {prompt}")
        for index in sorted(self._ids):
            ids = self._new(index)
            kind = "sequence_index" if many else "beam"
            if self._prompts is not None:
                self._say(f"Output {kind} {index}: {self._prompts.tokenizer.decode(ids)}")
            self._say(f"Output sequence: {ids}")

    def _new(self, index: int) -> list[int]:
        """The generated ids; a whole answer begins with the prompt unless that was excluded."""
        ids = self._ids[index]
        restated = not (self._question.streaming or self._question.exclude_input)
        if restated and ids[: len(self._prompt_ids)] == self._prompt_ids:
            return ids[len(self._prompt_ids) :]
        return ids

    def _matches(self) -> bool:
        expected = self._question.expected_ids
        if expected is None:
            return True
        found = self._new(0) if self._ids else []
        equal = sum(a == b for a, b in zip(found, expected, strict=False))
        part = equal / max(len(expected), len(found), 1)
        passed = part >= self._question.threshold
        self._say(f"{'PASS!' if passed else 'FAIL!'} {100 * part:.1f} % of the tokens are equal")
        if not passed:
            self._say(f"expected: {expected}")
        return passed

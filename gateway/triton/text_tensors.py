"""Encoding of requests to the text models `ensemble` and `tensorrt_llm_bls`, and of responses.

The output `text_output` is a BYTES tensor with one text per beam. It is read as a flat list without
a batch dimension, although v0.5 declares two dimensions.

A streaming ensemble decodes the tokens of each engine step separately. With sentencepiece
tokenizers, the space before a word is then lost, and a character that consists of two tokens
becomes two U+FFFD. The gateway cannot repair this. A BLS model that accumulates tokens sends the
complete text so far in each response, so only the end of the text may be incomplete.
"""

from __future__ import annotations

from gateway.deltas import TokenDelta
from gateway.errors import EngineError
from gateway.generation.engine_request import Generation, TextPrompt
from gateway.triton import bytes_tensor
from gateway.triton.model_capabilities import ModelCapabilities, TextModel
from gateway.triton.protobuf import pb
from gateway.triton.request import InferRequest, RequestBuilder
from gateway.triton.tensors import add_common, add_sampling, engine_stats, is_final

_REPLACEMENT = "\ufffd"
_NEVER = -1


def text_request(
    capabilities: ModelCapabilities, generation: Generation, text: TextPrompt
) -> InferRequest:
    """Return the request for one generation.

    The request asks for a stream of responses if the model can stream. For a beam search, or if
    `text.single_response` is True, it asks for a single response.
    """
    build = RequestBuilder(
        *(capabilities.model, capabilities.inputs, generation.request_id),
        names_outputs=capabilities.names_outputs,
    )
    build.texts("prompt", [text.text])
    build.scalar("max_tokens", generation.max_tokens)
    if build.has("end_id"):
        # Always send an end id, even if no token may end the answer (`_NEVER`). Without an end id
        # in the request, preprocessing would use its tokenizer's own end id.
        build.scalar("end_id", _NEVER if generation.end_id is None else generation.end_id)
    if text.stop and build.has("stop_words"):
        build.texts("stop_words", text.stop)
    if text.bad:
        build.texts("bad_words", text.bad)
    if text.bias:
        build.texts("bias", [word for word, _ in text.bias])
        build.numbers("bias_weights", [weight for _, weight in text.bias], len(text.bias))
    build.scalar("seed", generation.seed)
    add_sampling(build, generation)
    add_common(build, capabilities, generation)
    build.output("text_output")
    return build.request


class TextReader:
    """Reader of the responses to one request."""

    def __init__(self, capabilities: ModelCapabilities, model: TextModel, text: TextPrompt) -> None:
        self._capabilities = capabilities
        self._model = model
        self._text = text
        self._seen = ""
        self._silent = 0

    def delta(self, response: pb.ModelInferResponse) -> TokenDelta:
        """Return the new text in a response, as a `TokenDelta`.

        `tokens` of the delta is None if the number of new tokens is unknown.
        """
        final = is_final(response) or not self._capabilities.decoupled
        found = _texts(response)
        text = found[0] if found else ""
        stats = engine_stats(response, self._capabilities)
        if not self._capabilities.decoupled or (self._text.single_response and found):
            return TokenDelta([], final, stats, text=self._strip_prompt(text))
        if self._model.accumulates:
            text = self._take_new(text)
        tokens = None
        if self._model.token_by_token:
            tokens = self._count(text) if found else 0
        return TokenDelta([], final, stats, text=text, tokens=tokens)

    def beams(self, response: pb.ModelInferResponse) -> list[TokenDelta]:
        """Return a `TokenDelta` for each beam, the best beam first.

        `response` is the only response of a beam search.
        """
        return [TokenDelta([], True, text=self._strip_prompt(text)) for text in _texts(response)]

    def _count(self, text: str) -> int:
        """Return the number of tokens to count for a response with `text`.

        An empty response usually means that the engine has generated a token without text. But the
        last response may be empty without any token. So an empty response counts as a token only
        when another response follows.
        """
        silent, self._silent = self._silent, int(not text)
        return silent + int(bool(text))

    def _strip_prompt(self, text: str) -> str:
        """Return the text without a repeated prompt and without an incomplete last character."""
        if self._capabilities.restates_prompt:
            if not text.startswith(self._text.restated):
                raise EngineError("The engine's answer does not begin with the prompt.")
            text = text[len(self._text.restated) :]
        return text.rstrip(_REPLACEMENT)

    def _take_new(self, text: str) -> str:
        """Return the new part of the complete text so far, without an incomplete last character.

        Return "" if the text is not longer than the previous text. This happens after a stop word,
        when a BLS model sends empty texts.
        """
        text = text.rstrip(_REPLACEMENT)
        added = text[len(self._seen) :]
        if added:
            self._seen = text
        return added


def _texts(response: pb.ModelInferResponse) -> list[str]:
    for tensor, raw in zip(response.outputs, response.raw_output_contents, strict=True):
        if tensor.name == "text_output":
            return bytes_tensor.unpack(raw)
    return []

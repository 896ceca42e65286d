"""Guided decoding: compilation of a request's guide to a grammar over the model's vocabulary.

A guide is the constraint that a request's output must follow: any JSON, a JSON schema, a regular
expression or an EBNF grammar. llguidance compiles the guides, even if the configuration names the
backend xgrammar. In this case, `guides.grammar` first converts the guide to a grammar that allows
the same texts as xgrammar does. This module needs llguidance, so it is imported only if guided
decoding is configured.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from guides.grammar import to_grammar
from guides.kinds import Backend, Kind
from guides.reasons import reason
from triton_repo.cpu_executor.checks import check
from triton_repo.cpu_executor.executor_config import GuidedBackend, GuidedDecodingConfig
from triton_repo.cpu_executor.guide import GuideError, GuideState
from triton_repo.cpu_executor.request_config import GuidedDecodingParams, GuideKind

_KINDS: dict[GuideKind, Kind] = {
    GuideKind.JSON: "json",
    GuideKind.JSON_SCHEMA: "json_schema",
    GuideKind.REGEX: "regex",
    GuideKind.EBNF_GRAMMAR: "ebnf_grammar",
}


class GuideCompiler:
    """Compiler of requests' guides to grammars.

    The compiler runs in one separate thread, so a guide that takes long to compile does not delay
    the requests that are already running.
    """

    def __init__(self, config: GuidedDecodingConfig, vocab_size: int) -> None:
        tokenizer, stop_ids = config.tokenizer_str, config.stop_token_ids
        check(
            tokenizer is not None,
            "guided_decoding_config without tokenizer_str is not supported by the CPU executor",
        )
        assert tokenizer is not None
        for token in stop_ids or ():
            check(0 <= token < vocab_size, f"stop_token_ids: {token} is not in the vocabulary")
        self._tokenizer = LLTokenizer(tokenizer, n_vocab=vocab_size, eos_token=stop_ids)
        self.stop_ids = frozenset(self._tokenizer.eos_tokens)
        self._vocab_size = vocab_size
        self._backend: Backend = (
            "llguidance" if config.backend == GuidedBackend.LLGUIDANCE else "xgrammar"
        )
        # Omit the parser's state from error messages: clients cannot use it.
        self._limits = LLParserLimits(verbose_errors=False)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="guide")

    def compile(self, params: GuidedDecodingParams) -> Future[GuideState]:
        """Start compiling a guide. The returned future raises ``GuideError`` if it is invalid."""
        return self._thread.submit(self._compile, params)

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)

    def _compile(self, params: GuidedDecodingParams) -> GuideState:
        kind: Kind = _KINDS[params.guide_type]
        try:
            grammar = to_grammar(kind, params.guide or "", self._backend)
            matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=self._limits)
            guide = GuideState(matcher)
            if matcher.is_error():
                raise GuideError(reason(matcher.get_error()))
            # Compute the first mask now. If the grammar matches no text at all, this raises an
            # error before the executor processes the prompt.
            guide.mask(np.zeros(self._vocab_size, np.float32), sorted(self.stop_ids))
        except (GuideError, ValueError, RecursionError) as error:
            raise GuideError(f"Invalid guide of type {kind}: {error}") from error
        return guide

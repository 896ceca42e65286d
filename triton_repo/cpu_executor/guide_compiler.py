"""Guided decoding: from the guide of a request to a grammar over the model's vocabulary.

The grammars are llguidance's, whichever backend the configuration names. Only the dialect of
``EBNF_GRAMMAR`` differs: xgrammar's EBNF, or for the backend LLGUIDANCE its Lark, as in
TensorRT-LLM. This module is imported only where guided decoding is configured.
"""

from __future__ import annotations

import json
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, regex_to_lark

from triton_repo.cpu_executor.checks import check
from triton_repo.cpu_executor.ebnf import to_lark
from triton_repo.cpu_executor.executor_config import GuidedBackend, GuidedDecodingConfig
from triton_repo.cpu_executor.guide import Guide, GuideError, reason
from triton_repo.cpu_executor.request_config import GuidedDecodingParams, GuideKind

# xgrammar's grammar for GuideType.JSON begins with one of these two.
ANY_JSON = {"type": ["object", "array"]}
# A space, or a new line with its indentation. A small model that may write any number of either
# sometimes never stops.
JSON_WHITESPACE = r"\n[ \t]{0,20}| "
# Where only one text can follow, llguidance would take it from the tokenizer, which may turn it
# into a special token that is no text.
OPTIONS = '%llguidance {"no_forcing": true}'


class GuideCompiler:
    """Compiles guides, one at a time and in a thread of its own: a heavy one holds up no step."""

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
        self._lark = config.backend == GuidedBackend.LLGUIDANCE
        # An error message with the parser's state would be long and mean nothing to a client.
        self._limits = LLParserLimits(verbose_errors=False)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="guide")

    def compile(self, params: GuidedDecodingParams) -> Future[Guide]:
        """The guide at its start, or ``GuideError`` with what is wrong with it."""
        return self._thread.submit(self._compile, params)

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)

    def _compile(self, params: GuidedDecodingParams) -> Guide:
        try:
            lark = self._grammar(params.guide_type, params.guide or "")
            grammar = LLMatcher.grammar_from_lark(lark)
            matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=self._limits)
            guide = Guide(matcher)
            if matcher.is_error():
                raise GuideError(reason(matcher.get_error()))
            # A grammar that matches nothing is found here, and not after the prompt was run.
            guide.mask(np.zeros(self._vocab_size, np.float32), sorted(self.stop_ids))
        except (GuideError, ValueError, RecursionError) as error:
            name = params.guide_type.name.lower()
            raise GuideError(f"Invalid guide of type {name}: {error}") from error
        return guide

    def _grammar(self, kind: GuideKind, guide: str) -> str:
        if kind == GuideKind.REGEX:
            # As in ECMAScript, \d and \w are ASCII.
            return f"{OPTIONS}\nstart: /{regex_to_lark(guide, 'dw')}/"
        if kind == GuideKind.EBNF_GRAMMAR:
            return guide if self._lark else f"{OPTIONS}\n{to_lark(guide)}"
        schema = ANY_JSON if kind == GuideKind.JSON else json.loads(guide)
        # True and False are schemas too, but have no room for options.
        if isinstance(schema, dict):
            schema = {"x-guidance": {"whitespace_pattern": JSON_WHITESPACE}, **schema}
        return f"{OPTIONS}\nstart: %json {json.dumps(schema)}"

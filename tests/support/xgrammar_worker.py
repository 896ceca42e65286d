"""Compiles guides with one release of xgrammar, with the options that TensorRT-LLM uses.

``python -m tests.support.xgrammar_worker FOLDER [VOCABULARY SIZE]`` reads one JSON line ``[kind,
text]`` per guide. Each output line has the release's error or null, the CPU seconds, and a list.
Times above 0.2 s are scaled to those of a quiet machine.
For ``[kind, text, answers]``, the list says which answers the guide accepts, and the tokens must be
single bytes. The time includes creating a matcher, which computes the grammar's first state. FOLDER
has the wheel's files. Only the compiled module is imported, as the package needs torch.

VOCABULARY is the file of Tekken in the mistral-common wheel: a byte-level BPE of 131,072 tokens in
merge order. The first SIZE tokens are used. The last of them are replaced by the 1,100 numbers of
two and three digits, which Llama 3 and GPT-4 have as tokens and Tekken lacks. Without VOCABULARY,
the tokens are single bytes.
"""

from __future__ import annotations

import base64
import importlib
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from tests.support.cpu import measure_slowness

# Longer times are scaled to those of a quiet machine.
_SHORT_S = 0.2
_BYTES = [bytes([code]) for code in range(256)]
# any_whitespace, no indent, no separators, strict_mode
_JSON = (True, None, None, True)


def _vocabulary(file: Path, size: int) -> list[bytes]:
    numbers = [f"{number:0{width}}".encode() for width in (2, 3) for number in range(10**width)]
    with file.open(encoding="utf-8") as stream:
        tokens = [base64.b64decode(each["token_bytes"]) for each in json.load(stream)["vocab"]]
    return tokens[: size - len(numbers) - 1] + numbers + [b"</s>"]


def main() -> None:
    folder = Path(sys.argv[1])
    sys.path.insert(0, str(folder))
    package = ModuleType("xgrammar")
    package.__path__ = [str(folder / "xgrammar")]
    sys.modules["xgrammar"] = package
    if (folder / "xgrammar" / "load_binding.py").exists():  # since 0.2
        importlib.import_module("xgrammar.load_binding")
    core: Any = importlib.import_module("xgrammar.base")._core
    tokens = _vocabulary(Path(sys.argv[2]), int(sys.argv[3])) if sys.argv[2:] else _BYTES
    # The last token is the end of the text.
    end = len(tokens) - 1
    vocabulary = _call(
        core.TokenizerInfo, *[(tokens, raw, None, [end], False) for raw in (0, "RAW")]
    )
    compiler = _call(core.GrammarCompiler, (vocabulary, 1, False), (vocabulary, 1, False, -1))
    for line in sys.stdin:
        kind, text, *more = json.loads(line)
        why, accepted = None, []
        started = time.process_time()
        try:
            # No stop tokens, no forced termination, and no rollback.
            given = (_compile(core, compiler, kind, text), None, False, 0)
            matcher = _call(core.GrammarMatcher, given, (*given, None))
            for answer in more[0] if more else ():
                ids = [*answer.encode(), end]
                accepted.append(all(matcher.accept_token(each, False) for each in ids))
                matcher.reset()
        except RuntimeError as error:
            why = str(error).partition("\n")[0]
        seconds = time.process_time() - started
        if seconds > _SHORT_S:
            seconds /= measure_slowness()
        print(json.dumps([why, seconds, accepted]), flush=True)


def _compile(core: Any, compiler: Any, kind: str, text: str) -> Any:
    if kind == "regex":
        return compiler.compile_regex(text)
    if kind == "json_schema":
        given = (text, *_JSON)
        return _call(compiler.compile_json_schema, given, (*given, None), (*given, None, False))
    if hasattr(compiler, "compile_grammar_from_strings"):
        return compiler.compile_grammar_from_strings(text, "root")
    return compiler.compile_grammar(core.Grammar.from_ebnf(text, "root"))


def _call(function: Callable[..., Any], *alternatives: tuple[Any, ...]) -> Any:
    """Call a function with the first of the argument tuples that this release accepts."""
    for arguments in alternatives[:-1]:
        try:
            return function(*arguments)
        except TypeError:
            continue
    return function(*alternatives[-1])


if __name__ == "__main__":
    main()

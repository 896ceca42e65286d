"""Compile guides with one release of xgrammar, as TensorRT-LLM does.

``python -m tests.support.xgrammar_worker FOLDER [VOCABULARY SIZE]`` reads ``[kind, text]`` a line,
as JSON, and answers each with why that release throws on the guide, or null, and the seconds of CPU
that it took. A matcher is made too, since the first state of a grammar is computed there. FOLDER
has the wheel's files. Only the compiled part is imported: the package itself needs torch.

VOCABULARY is Tekken's file, as the wheel of mistral-common has it: a byte-level BPE of 131,072
tokens in the order of their merges. The first SIZE are taken, but the last of these are replaced
by the 1,100 numbers of two and three digits, which Llama 3 and GPT-4 have as tokens and Tekken has
not. Without VOCABULARY, the tokens are single bytes.
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

_BYTES = [bytes([code]) for code in range(256)]
# Without an indentation, with any white space, and objects closed where they do not say otherwise.
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
    # The last one stands for the end of a text.
    end = len(tokens) - 1
    vocabulary = _call(
        core.TokenizerInfo, *[(tokens, raw, None, [end], False) for raw in (0, "RAW")]
    )
    compiler = _call(core.GrammarCompiler, (vocabulary, 1, False), (vocabulary, 1, False, -1))
    for line in sys.stdin:
        kind, text = json.loads(line)
        why = None
        started = time.process_time()
        try:
            # No token stops a text early, and none is taken back.
            given = (_compile(core, compiler, kind, text), None, False, 0)
            _call(core.GrammarMatcher, given, (*given, None))
        except RuntimeError as error:
            why = str(error).partition("\n")[0]
        print(json.dumps([why, time.process_time() - started]), flush=True)


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
    """Call a function with the first arguments that this release takes."""
    for arguments in alternatives[:-1]:
        try:
            return function(*arguments)
        except TypeError:
            continue
    return function(*alternatives[-1])


if __name__ == "__main__":
    main()

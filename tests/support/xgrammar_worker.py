"""Compile guides with one release of xgrammar, as TensorRT-LLM does.

``python -m tests.support.xgrammar_worker FOLDER`` reads ``[kind, text]`` a line, as JSON, and
answers each with why that release throws on the guide, or null. A matcher is made too, since the
first state of a grammar is computed there. FOLDER has the wheel's files. Only the compiled part is
imported: the package itself needs torch.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

# Single bytes; the last one stands for the end of a text.
_VOCABULARY = [bytes([code]) for code in range(256)]
# Without an indentation, with any white space, and objects closed where they do not say otherwise.
_JSON = (True, None, None, True)


def main() -> None:
    folder = Path(sys.argv[1])
    sys.path.insert(0, str(folder))
    package = ModuleType("xgrammar")
    package.__path__ = [str(folder / "xgrammar")]
    sys.modules["xgrammar"] = package
    if (folder / "xgrammar" / "load_binding.py").exists():  # since 0.2
        importlib.import_module("xgrammar.load_binding")
    core: Any = importlib.import_module("xgrammar.base")._core
    vocabulary = _call(
        core.TokenizerInfo, *[(_VOCABULARY, raw, None, [255], False) for raw in (0, "RAW")]
    )
    compiler = _call(core.GrammarCompiler, (vocabulary, 1, False), (vocabulary, 1, False, -1))
    for line in sys.stdin:
        kind, text = json.loads(line)
        try:
            # No token stops a text early, and none is taken back.
            given = (_compile(core, compiler, kind, text), None, False, 0)
            _call(core.GrammarMatcher, given, (*given, None))
        except RuntimeError as error:
            print(json.dumps(str(error).partition("\n")[0]), flush=True)
        else:
            print("null", flush=True)


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

"""The CPU executor under TensorRT-LLM's import names."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

# In a process of its own, since it changes sys.modules.
SCRIPT = """
from triton_repo.cpu_executor.install import install
assert install()
import tensorrt_llm.bindings.executor as trtllm
import tensorrt_llm.logger as logger
from tensorrt_llm.llmapi.tokenizer import _xgrammar_tokenizer_info
import tensorrt_llm
logger.debug("text")
assert trtllm.SamplingConfig(top_k=3).top_k == 3
assert tensorrt_llm.bindings.executor is trtllm
assert not install()


class Backend:
    def to_str(self):
        return "{}"


class Fast:
    backend_tokenizer = Backend()
    eos_token_id = 1

    def get_vocab(self):
        return {"b": 1, "a": 0}


class Slow:
    backend_tokenizer = None


assert _xgrammar_tokenizer_info(Fast()) == {
    "encoded_vocab": ["a", "b"],
    "tokenizer_str": "{}",
    "stop_token_ids": [1],
}
Fast.eos_token_id = None
for tokenizer, text in ((Slow(), "Unsupported tokenizer type"), (Fast(), "no eos_token")):
    try:
        _xgrammar_tokenizer_info(tokenizer)
    except ValueError as error:
        assert text in str(error)
    else:
        raise AssertionError(text)
"""

REAL = """
from triton_repo.cpu_executor.install import install
assert not install()
import tensorrt_llm
assert tensorrt_llm.REAL
"""


def python(script: str, path: Path) -> None:
    root = Path(__file__).parents[3]
    environment = {"PYTHONPATH": f"{path}:{root}", "PATH": ""}
    subprocess.run([sys.executable, "-c", script], check=True, env=environment, timeout=60)


def test_installed_names_can_be_imported(tmp_path: Path) -> None:
    python(SCRIPT, tmp_path)


def test_a_real_installation_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "tensorrt_llm.py").write_text("REAL = True\n")
    python(REAL, tmp_path)

"""The CPU executor installed under TensorRT-LLM's import names, in separate processes."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.support.executor_client import GOLDEN, golden_prompt
from tests.support.triton_server import serving
from triton_repo.cpu_executor.engine import build

ROOT = Path(__file__).parents[3]

NAMES = """
import tensorrt_llm.bindings.executor as trtllm
import tensorrt_llm.logger as logger
from tensorrt_llm.llmapi.tokenizer import _xgrammar_tokenizer_info
import tensorrt_llm
from tensorrt_llm import LLM, SamplingParams
from tensorrt_llm._utils import global_mpi_rank, global_mpi_size
from tensorrt_llm.executor.request import LoRARequest
from tensorrt_llm.llmapi.llm import RequestOutput
from tensorrt_llm.llmapi.llm_utils import update_llm_args_with_extra_dict
logger.debug("text")
assert (global_mpi_rank(), global_mpi_size()) == (0, 1)
assert update_llm_args_with_extra_dict({"a": 1, "b": 2}, {"b": 3}) == {"a": 1, "b": 3}
assert trtllm.SamplingConfig(top_k=3).top_k == 3
assert tensorrt_llm.bindings.executor is trtllm
assert tensorrt_llm.__version__ == trtllm.__version__


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

# Calls that upstream's model.py makes to convert tensors.
TENSORS = """
import sys
import numpy as np
import torch
from torch import from_numpy
from torch.utils.dlpack import from_dlpack, to_dlpack
import tensorrt_llm.bindings.executor as trtllm

numpy_of = {torch.float32: np.float32, torch.float16: np.float16, torch.bfloat16: np.float32}
assert len(numpy_of) == 3
weights = from_numpy(np.ones((1, 2, 3), np.float16))
assert weights.squeeze(dim=0).shape == (2, 3)
assert weights.squeeze(dim=1).shape == (1, 2, 3)
row = torch.unsqueeze(weights[0], dim=0)
assert isinstance(row, torch.Tensor) and row.shape == (1, 2, 3)
lora = trtllm.LoraConfig(
    task_id=1, weights=weights.squeeze(dim=0), config=from_numpy(np.ones((2, 3), np.int32))
)
assert lora.weights.shape == (2, 3)
moved = from_dlpack(np.arange(3, dtype=np.float32).__dlpack__())
assert moved.tolist() == [0, 1, 2] and moved.dtype is torch.float32
shared = from_dlpack(to_dlpack(weights))
weights[0, 0, 0] = 7
assert shared.shape == (1, 2, 3) and shared[0, 0, 0] == 7 and shared.dtype is torch.float16
fixed = np.arange(3)
fixed.flags.writeable = False
assert from_dlpack(to_dlpack(from_numpy(fixed))).tolist() == [0, 1, 2]

prompt = [int(token) for token in sys.argv[2:]]
output = trtllm.OutputConfig(return_context_logits=True, return_generation_logits=True)
request = trtllm.Request(prompt, max_new_tokens=2, output_config=output, streaming=None)
config = trtllm.ExecutorConfig()
with trtllm.Executor(sys.argv[1], trtllm.ModelType.DECODER_ONLY, config) as executor:
    executor.enqueue_requests([request])
    (response,) = executor.await_responses(timeout=60.0)
    result = response.result
for logits in (result.context_logits, result.generation_logits):
    assert isinstance(logits, torch.Tensor)
    assert logits.dtype is torch.float32
array = np.expand_dims(np.array(result.context_logits, numpy_of[result.context_logits.dtype]), 0)
assert type(array) is np.ndarray and array.shape[:2] == (1, len(prompt))
assert array[0, -1].argmax() == result.output_token_ids[0][len(prompt)]
"""

REAL_TORCH = """
import torch
from triton_repo.cpu_executor.torch_tensors import as_torch
import numpy as np
assert as_torch(np.zeros(2, np.float32)) == ("real", 2)
"""


def python(*arguments: str | Path, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        env={"PYTHONPATH": f"{path}:{ROOT}", "PATH": ""},
        timeout=60,
    )


def install(folder: Path, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    return python("-m", "triton_repo.cpu_executor.install", folder, path=path)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("path") / "names"
    answer = install(folder)
    assert (answer.returncode, answer.stderr) == (0, "")
    assert answer.stdout == f"wrote {folder / 'tensorrt_llm'}\nwrote {folder / 'torch'}\n"
    return folder


def test_installed_names_can_be_imported(installed: Path) -> None:
    answer = python("-c", NAMES, path=installed)
    assert answer.stderr == ""


def test_tensors_go_in_and_out_as_upstream_moves_them(installed: Path, tmp_path: Path) -> None:
    engine = build(
        GOLDEN / "gqa", tmp_path, gather_context_logits=True, gather_generation_logits=True
    )
    answer = python("-c", TENSORS, engine, *map(str, golden_prompt()[:20]), path=installed)
    assert answer.stderr == ""


@pytest.mark.slow
def test_triton_takes_and_gives_such_tensors(tmp_path: Path) -> None:
    version = tmp_path / "repository" / "moved" / "1"
    assert install(version).returncode == 0
    shutil.copyfile(ROOT / "tests" / "support" / "models" / "moved.py", version / "model.py")
    (version.parent / "config.pbtxt").write_text(
        'name: "moved" backend: "python" max_batch_size: 0\n'
        'input [ { name: "X" data_type: TYPE_FP32 dims: [ -1, 2 ] } ]\n'
        'output [ { name: "Y" data_type: TYPE_FP32 dims: [ -1, 2 ] } ]\n'
        "instance_group [ { count: 1 kind: KIND_CPU } ]\n"
    )
    sent = np.arange(6, dtype=np.float32).reshape(3, 2)
    with serving(tmp_path) as server:
        assert server.unary("moved", {"X": sent})["Y"].tolist() == sent.tolist()


def test_a_torch_that_is_there_is_used_and_not_shadowed(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("def from_numpy(array): return 'real', len(array)\n")
    answer = install(tmp_path / "names", path=tmp_path)
    assert answer.stdout == f"wrote {tmp_path / 'names' / 'tensorrt_llm'}\n"
    assert python("-c", REAL_TORCH, path=tmp_path).stderr == ""


def test_a_real_installation_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "tensorrt_llm.py").write_text("REAL = True\n")
    answer = install(tmp_path / "names", path=tmp_path)
    assert answer.returncode == 1
    assert answer.stderr == f"TensorRT-LLM is installed here: {tmp_path / 'tensorrt_llm.py'}\n"
    assert not (tmp_path / "names").exists()


def test_installing_again_changes_nothing(installed: Path) -> None:
    assert install(installed, path=installed).returncode == 0
    assert python("-c", NAMES, path=installed).stderr == ""

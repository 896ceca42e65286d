"""Malformed adapter uploads: each gives 4xx or a complete adapter, in bounded memory."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from adapters import npy
from ops.commands.up import DEMO_MODEL
from tests.support.cpu import costs_less_than
from tests.support.gateway_process import GatewayProcess
from tests.support.generated_adapters import convert_folder, write_adapter
from tests.support.local_stack import Stack, Up

KEY = "an admin key of enough characters"
CPU_SECONDS = 1.0
MEGABYTE = 1024 * 1024
FUZZ = settings(
    max_examples=40,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
Files = dict[str, bytes]


class Folder(Files):
    """Adapter files whose repr has only sizes: Hypothesis does not print longer ones."""

    def __repr__(self) -> str:
        return repr({name: len(data) for name, data in self.items()})


@pytest.fixture(scope="module")
def gateway(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    folder = tmp_path_factory.mktemp("uploads")
    limit = 32 * MEGABYTE
    with GatewayProcess(folder, stack, admin_key=KEY, max_adapter_bytes=limit) as gateway:
        yield gateway


@pytest.fixture(scope="module")
def peft_files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    folder = write_adapter(tmp_path_factory.mktemp("peft") / "a", DEMO_MODEL, seed=41)
    return Folder({path.name: path.read_bytes() for path in folder.iterdir()})


@pytest.fixture(scope="module")
def npy_files(up: Up, tmp_path_factory: pytest.TempPathFactory) -> Files:
    folder = tmp_path_factory.mktemp("npy")
    npy.write(
        convert_folder(write_adapter(folder / "a", DEMO_MODEL, seed=42), up.state_dir / "engine"),
        folder,
    )
    return Folder({path.name: path.read_bytes() for path in folder.glob("*.npy")})


def _upload(gateway: GatewayProcess, files: Files) -> httpx.Response:
    parts = [("file", (name, data)) for name, data in files.items()]
    form = {"name": "fuzzed", "base": "demo"}
    with gateway.client(KEY) as client:
        answer = client.post("/v1/adapters", data=form, files=parts)
        if answer.status_code == 201:
            assert client.post("/v1/adapters/fuzzed/verify").status_code == 200
            assert client.delete("/v1/adapters/fuzzed").status_code == 200
        else:
            assert 400 <= answer.status_code < 500, answer.text
            assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
        assert client.get("/v1/adapters").json()["data"] == []
    return answer


EDITS = st.lists(
    st.tuples(st.integers(0, 4000), st.integers(0, 6), st.binary(max_size=6)), max_size=4
)


def _edited(data: bytes, edits: list[tuple[int, int, bytes]]) -> bytes:
    """Return `data` with bytes replaced, removed or inserted, mostly in its headers."""
    for place, removed, put in edits:
        start = place % (len(data) + 1)
        data = data[:start] + put + data[start + removed :]
    return data


@FUZZ
@given(st.data())
def test_damaged_files(
    gateway: GatewayProcess, peft_files: Files, npy_files: Files, data: st.DataObject
) -> None:
    files = dict(data.draw(st.sampled_from([peft_files, npy_files])))
    name = data.draw(st.sampled_from(sorted(files)))
    files[name] = _edited(files[name], data.draw(EDITS))
    _upload(gateway, files)


ANY: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
    | st.sampled_from([10**400, 2**63, "LORA", ".*", "a{99999999999}", "(" * 99, ["q_proj"]]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)  # fmt: skip
FIELDS = ["r", "lora_alpha", "rank_pattern", "alpha_pattern", "target_modules", "peft_type", "bias"]
FIELDS += ["task_type", "use_rslora", "base_model_name_or_path", "init_lora_weights", "x"]


@FUZZ
@example({"r": 10**400})
@given(st.dictionaries(st.sampled_from(FIELDS), ANY, min_size=1, max_size=3))
def test_any_configuration(
    gateway: GatewayProcess, peft_files: Files, changed: dict[str, Any]
) -> None:
    config = json.loads(peft_files["adapter_config.json"]) | changed
    _upload(gateway, peft_files | {"adapter_config.json": json.dumps(config).encode()})


@FUZZ
@given(
    st.dictionaries(
        st.text(max_size=6)
        | st.just("base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"),
        ANY | st.fixed_dictionaries({"dtype": ANY, "shape": ANY, "data_offsets": ANY}),
        min_size=1,
        max_size=3,
    )
)
def test_any_header(gateway: GatewayProcess, peft_files: Files, header: dict[str, Any]) -> None:
    raw = json.dumps(header).encode()
    data = len(raw).to_bytes(8, "little") + raw + bytes(64)
    assert _upload(gateway, peft_files | {"adapter_model.safetensors": data}).status_code == 400


def _tensors(header: bytes) -> bytes:
    return len(header).to_bytes(8, "little") + header


_Q = "model.layers.0.self_attn.q_proj.lora_A.weight"


def _named(names: Iterable[str]) -> Files:
    """Return a safetensors file of empty tensors with these names."""
    entry = b'":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'
    header = b",".join(b'"' + name.encode() + entry for name in names)
    return {"adapter_model.safetensors": _tensors(b"{" + header + b"}")}


def _shape(numbers: bytes) -> bytes:
    entry = b'{"a":{"dtype":"F32","data_offsets":[0,4],"shape":[' + numbers + b"]}}"
    return _tensors(entry)


def _array(shape: bytes) -> bytes:
    header = b"{'descr': '<i4', 'fortran_order': False, 'shape': (" + shape + b")}"
    return b"\x93NUMPY\x02\x00" + len(header).to_bytes(4, "little") + header


def _configuration(**fields: Any) -> Files:
    known = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, **fields}
    return {"adapter_config.json": json.dumps(known).encode()}


# Built only when used, as each pytest worker collects all tests.
BOMBS: dict[str, Callable[[], Files]] = {
    "header length": lambda: {"adapter_model.safetensors": b"\xff" * 8},
    "length past the end": lambda: {"adapter_model.safetensors": (2**40).to_bytes(8, "little")},
    "empty objects": lambda: {
        "adapter_model.safetensors": _tensors(b'{"a":[' + b"{}," * 5_400_000 + b"{}]}")
    },
    "empty strings": lambda: {
        "adapter_model.safetensors": _tensors(b'{"a":[' + b'"",' * 5_400_000 + b'""]}')
    },
    "nested": lambda: {"adapter_model.safetensors": _tensors(b'{"a":' + b"[" * 2_000_000)},
    "long numbers": lambda: {"adapter_model.safetensors": _shape(b",".join([b"9" * 4000] * 3000))},
    "many numbers": lambda: {"adapter_model.safetensors": _shape(b",".join([b"9"] * 6_000_000))},
    "a number past all": lambda: {"adapter_model.safetensors": _shape(b"9" * 5_000_000)},
    "a tensor's name without end": lambda: _named(["module." * 1_400_000 + _Q]),
    "names of wrappers": lambda: _named(
        f"{'module.' * 90}model.layers.{n}.self_attn.q_proj.lora_A.weight" for n in range(20_000)
    ),
    "names of layers": lambda: _named(
        f"model.layers.{n}.self_attn.q_proj.lora_A.weight" for n in range(100_000)
    ),
    "names of many parts": lambda: _named(f"{n}{'.a' * 450}" for n in range(16_000)),
    "configuration": lambda: {"adapter_config.json": b'{"x":[' + b"{}," * 1_300_000 + b"{}]}"},
    "nested configuration": lambda: {"adapter_config.json": b'{"x":' + b"[" * 3_000_000},
    "large configuration": lambda: {"adapter_config.json": b" " * (5 * MEGABYTE)},
    "an expression that never ends": lambda: _configuration(rank_pattern={"(?x:([^!]+) +)!": 2}),
    "expressions for all modules": lambda: _configuration(
        rank_pattern={".*l" + "(.|[a-z])" * 27 + f"[{n}-9]": 2 for n in range(10)}
        | {f"({'.*' * 100}){n}": 2 for n in range(4000)}
    ),
    "a name that never ends": lambda: _configuration(base_model_name_or_path="models--" * 50_000),
    "npy header length": lambda: {"model.lora_config.npy": b"\x93NUMPY\x02\x00" + b"\xff" * 4},
    "npy long numbers": lambda: {"model.lora_config.npy": _array(b"9" * 4000 + b"," + b"9" * 4000)},
    "npy dimensions": lambda: {"model.lora_config.npy": _array(b"1," * 20_000)},
    "npy nested": lambda: {"model.lora_config.npy": _array(b"(" * 30_000)},
    "npy calls": lambda: {"model.lora_config.npy": _array(b"__import__('os').system('true')")},
    "npy pickle": lambda: {
        "model.lora_config.npy": _array(b"1,").replace(b"<i4", b"|O8") + b"cos\n"
    },
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_does_not_go_off(
    gateway: GatewayProcess, peft_files: Files, npy_files: Files, name: str
) -> None:
    """Check that refusing a bomb costs little more CPU time and memory than the upload itself."""
    bomb = BOMBS[name]()
    [file] = bomb
    good = npy_files if file.endswith(".npy") else peft_files
    process = psutil.Process(gateway.process.pid)
    _upload(gateway, good | {file: b"x"})  # warm-up: memory that any upload needs
    before = process.memory_info().rss
    with costs_less_than(CPU_SECONDS, process.pid):
        assert _upload(gateway, good | bomb).status_code in {400, 413}
    assert process.memory_info().rss - before < 200 * MEGABYTE


def test_a_form_of_too_many_or_too_large_parts(gateway: GatewayProcess) -> None:
    with gateway.client(KEY) as client:
        for parts in (
            [("file", (f"{n}", b"x")) for n in range(1000)],
            [("x" * 100_000, ("y", b"x"))],
            [("file", ("x" * 100_000, b"x"))],
        ):
            answer = client.post("/v1/adapters", data={"name": "n", "base": "demo"}, files=parts)
            assert answer.status_code == 400, answer.text
        many = {f"field{n}": "x" for n in range(1000)}
        answer = client.post("/v1/adapters", data=many, files=[("file", ("x", b"x"))])
        assert answer.status_code == 400
        large = {"name": "x" * (2 * MEGABYTE), "base": "demo"}
        answer = client.post("/v1/adapters", data=large, files=[("file", ("x", b"x"))])
        assert answer.status_code in {400, 413}


def test_not_a_number_in_an_array_of_numbers(gateway: GatewayProcess, npy_files: Files) -> None:
    weights = bytearray(npy_files["model.lora_weights.npy"])
    weights[-2:] = np.array([np.nan], np.float16).tobytes()
    answer = _upload(gateway, npy_files | {"model.lora_weights.npy": bytes(weights)})
    assert answer.status_code == 400

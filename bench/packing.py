"""Benchmark of three optimisations in the gateway, each compared with the unoptimised code.

    python -m bench.packing

The command prints a line with the CPU time of the optimised and of the unoptimised code:

- `request`: build a ModelInferRequest from serialized fields, instead of with protobuf's objects.
- `template`: render a chat template whose globals are in one dict, instead of in a ChainMap.
- `keys`: render a chat of 20 messages. For an expression such as `message.role`, the optimised
  template looks up a dict key before an attribute. Jinja looks up the attribute first.
"""

from __future__ import annotations

import copy
import struct
import time
from collections.abc import Callable

from jinja2 import Template
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tritonclient.grpc import service_pb2 as pb

from bench.machine import ROOT
from gateway.tokenization.chat_format import compile_template
from gateway.triton.names import CORE, Input, LogicalInput
from gateway.triton.request import RequestBuilder

_TYPES: dict[LogicalInput, str] = {
    "prompt_length": "INT32",
    "max_tokens": "INT32",
    "end_id": "INT32",
    "pad_id": "INT32",
    "seed": "UINT64",
    "top_k": "INT32",
    "top_p": "FP32",
    "temperature": "FP32",
    "streaming": "BOOL",
}
_PACKERS = {"INT32": "<i", "UINT64": "<Q", "FP32": "<f", "BOOL": "<?"}
_OUTPUTS = ("output_ids", "sequence_length")
_INPUTS = {name: Input(CORE[name][0], kind) for name, kind in _TYPES.items()} | {
    "prompt": Input("input_ids", "INT32")
}
_IDS = list(range(60))
_CHAT = {
    "messages": [{"role": "user", "content": "hi"}],
    "tools": None,
    "add_generation_prompt": True,
    "bos_token": "<s>",
    "eos_token": "</s>",
}


_LONG_CHAT = _CHAT | {
    "messages": [
        {"role": role, "content": "hi"} for _ in range(10) for role in ("user", "assistant")
    ]
}


def pack() -> bytes:
    build = RequestBuilder("tensorrt_llm", _INPUTS, "id")
    build.numbers("prompt", _IDS, len(_IDS))
    for name in _TYPES:
        build.scalar(name, 1)
    for name in _OUTPUTS:
        build.output(name)
    return build.request.data


def plain() -> bytes:
    request = pb.ModelInferRequest(model_name="tensorrt_llm", id="id")
    request.parameters["triton_enable_empty_final_response"].bool_param = True
    request.inputs.add(name="input_ids", datatype="INT32", shape=(1, len(_IDS)))
    contents = [struct.pack(f"<{len(_IDS)}i", *_IDS)]
    for name, kind in _TYPES.items():
        request.inputs.add(name=CORE[name][0], datatype=kind, shape=(1, 1))
        contents.append(struct.pack(_PACKERS[kind], 1))
    for name in _OUTPUTS:
        request.outputs.add(name=name)
    request.raw_input_contents.extend(contents)
    return request.SerializeToString()


def microseconds(work: Callable[[], object], count: int = 500) -> float:
    began = time.process_time()
    for _ in range(count):
        work()
    return 1e6 * (time.process_time() - began) / count


def _without_our_order(template: Template, source: str) -> Template:
    environment = copy.copy(template.environment)
    environment.__class__ = ImmutableSandboxedEnvironment
    plain = environment.from_string(source)
    plain.globals = dict(plain.globals)
    return plain


def main() -> None:
    assert pb.ModelInferRequest.FromString(pack()) == pb.ModelInferRequest.FromString(plain())
    source = (ROOT / "demo" / "chat_template.jinja").read_text(encoding="utf-8")
    template = compile_template(source)
    chained = template.environment.from_string(source)
    looks_up = _without_our_order(template, source)
    for name, ours, theirs in (
        ("request", pack, plain),
        ("template", lambda: template.render(_CHAT), lambda: chained.render(_CHAT)),
        ("keys", lambda: template.render(_LONG_CHAT), lambda: looks_up.render(_LONG_CHAT)),
    ):
        turns = [(microseconds(ours), microseconds(theirs)) for _ in range(15)]
        kept, usual = (min(column) for column in zip(*turns, strict=True))
        print(f"{name}: {kept:.1f} us, the plain way {usual:.1f} us, {usual / kept:.1f} times")


if __name__ == "__main__":
    main()

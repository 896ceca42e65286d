"""A scripted server for the llmapi model that reads adapters from its own disk."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from tritonclient.grpc import service_pb2 as pb

from adapters.convert import convert
from adapters.peft import read
from adapters.peft_files import PeftFiles, peft_files
from gateway.triton import bytes_tensor
from tests.support.fake_llmapi import FakeLlmapi, answer_to, build_outputs, inputs_of
from tests.support.in_process import save_tokenizer
from tests.support.lora_files import BASE

BASE_ANSWER = "base"
FOR_EVER = "for ever"
"""A prompt whose answer has a first delta and never ends."""


def save_model(folder: Path) -> Path:
    """Write a tokenizer folder for the base model of `tests.support.lora_files`."""
    save_tokenizer(folder)
    config = {"eos_token": "!", "chat_template": "{{ messages[0].content }}"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    config = {
        "architectures": [BASE.architecture],
        "num_hidden_layers": BASE.num_hidden_layers,
        "hidden_size": BASE.hidden_size,
        "num_attention_heads": BASE.num_attention_heads,
        "num_key_value_heads": BASE.num_key_value_heads,
        "intermediate_size": BASE.intermediate_size,
        "_name_or_path": "demo",
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_back(source: Path) -> PeftFiles:
    """Return the adapter of this PEFT folder, converted and written back."""
    return peft_files(convert(read(source), BASE), BASE)


def answer_of(source: Path) -> str:
    """Return the answer of an engine that read the written-back adapter."""
    return _answer(b"".join(write_back(source).weights()))


def _answer(weights: bytes) -> str:
    return hashlib.sha256(weights).hexdigest()[:12]


class DiskEngine(FakeLlmapi):
    """A fake engine whose answer is the content of the requested adapter's folder.

    The folder is read for each request. Like a real engine, this one reads only below its `disk`,
    and fails for an incomplete folder.
    """

    def __init__(self, disk: Path) -> None:
        super().__init__()
        self.disk = disk
        self.ids: dict[int, set[str]] = {}
        """The answers given under each adapter id."""

    async def ModelStreamInfer(
        self, requests: AsyncIterator[pb.ModelInferRequest], context: Any
    ) -> AsyncIterator[pb.ModelStreamInferResponse]:
        async for request in requests:
            inputs = inputs_of(request)
            if "stop" in inputs:
                yield pb.ModelStreamInferResponse(error_message="Request cancelled by client")
                continue
            self.requests.append(request)
            error, text = None, BASE_ANSWER
            if "lora_path" in inputs:
                [path] = bytes_tensor.unpack(inputs["lora_path"][2])
                error, text = self._read(Path(path))
                number = int.from_bytes(inputs["lora_id"][2], "little")
                self.ids.setdefault(number, set()).add(text)
            if error is not None:
                yield pb.ModelStreamInferResponse(error_message=error)
                continue
            [prompt] = bytes_tensor.unpack(inputs["text_input"][2])
            if prompt == FOR_EVER:
                yield answer_to(request, build_outputs(text), final=False)
                await asyncio.Event().wait()
            await asyncio.sleep(0)
            yield answer_to(request, build_outputs(text, "stop"), final=True)

    def _read(self, folder: Path) -> tuple[str | None, str]:
        if not folder.is_dir() or folder.parent != self.disk:
            gone = "lora_path does not exist on the Triton server's filesystem"
            return f"Error generating request: {gone}: {folder}", ""
        read(folder)
        return None, _answer((folder / "adapter_model.safetensors").read_bytes())

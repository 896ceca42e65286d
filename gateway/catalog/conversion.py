"""What an adapter must be for the engines that are there, and its conversion to that."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

from adapters import npy_files, peft
from adapters.adapter import Converted
from adapters.base_model import BaseModel, read_base_model, short_name
from adapters.errors import UnsupportedEngine
from gateway.config.settings import Settings
from gateway.triton.model_capabilities import ModelCapabilities


class Conversion:
    """Runs in a thread, one adapter at a time."""

    def __init__(
        self, settings: Settings, capabilities: Callable[[], Sequence[ModelCapabilities]]
    ) -> None:
        """`capabilities` are those of each kind of replicas that is there."""
        self._settings = settings
        self._capabilities = capabilities
        self._turn = asyncio.Lock()

    def _base_of(self) -> ModelCapabilities:
        """Those of the kind that says what an adapter must be: one with an engine, which knows its
        own limits and type, before one that reads adapters of any type from its disk."""
        served = self._capabilities()
        sent = (each for each in served if each.lora_dtype is not None)
        disks = (each for each in served if each.reads_adapters)
        return next(sent, None) or next(disks, served[0])

    def base_model(self) -> BaseModel:
        """What an adapter has to fit. Raises UnsupportedEngine, AdapterError, EngineUnavailable."""
        capabilities = self._base_of()
        if capabilities.text is not None and capabilities.text.loses_lora:
            raise UnsupportedEngine(
                *(capabilities.model, "lora_task_id", "a BLS model before v0.19"),
                "the core model, the ensemble or the BLS model of v0.19",
                "it passes adapters on to the engine in a wrong shape",
            )
        if capabilities.lora_dtype is None and not capabilities.reads_adapters:
            raise UnsupportedEngine(
                capabilities.model, "lora_weights", "no such input", "FP16 or BF16"
            )
        # The engine's folder may be on another host; the tokenizer's then gives the shapes.
        folders = (capabilities.engine_dir, self._settings.tokenizer_dir)
        folder = next((f for f in folders if (f / "config.json").is_file()), folders[0])
        # Adapters name what they were trained on, which is often the tokenizer's folder.
        names = (self._settings.model_name, short_name(str(self._settings.tokenizer_dir.resolve())))
        return read_base_model(folder, names, dtype=capabilities.lora_dtype)

    async def convert(self, folder: Path, *, within: Path | None) -> Converted:
        """The adapter in `folder` as engines take it, of PEFT or npy files.

        Every file must really lie inside `within`. Raises subclasses of AdapterError.
        """
        base = self.base_model()
        limit = self._settings.max_adapter_bytes
        # One at a time: a conversion holds the whole adapter in memory.
        back = any(each.reads_adapters for each in self._capabilities())
        async with self._turn:
            return await asyncio.to_thread(_read, folder, base, within, limit, back)


def _read(folder: Path, base: BaseModel, within: Path | None, limit: int, back: bool) -> Converted:
    """`back` says that it must have a PEFT form, too."""
    # numpy is needed for conversion alone; serving does without.
    from adapters import convert, npy, peft_files  # noqa: PLC0415

    if (folder / npy_files.WEIGHTS).exists() and not (folder / peft.CONFIG).exists():
        converted = npy.read(folder, base, within=within, max_bytes=limit)
    else:
        converted = convert.convert(peft.read(folder, within=within, max_bytes=limit), base)
    if back:
        peft_files.peft_files(converted, base)
    return converted

"""What an adapter must be for the engines that are there, and its conversion to that."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from adapters import npy_files, peft
from adapters.adapter import Converted
from adapters.base_model import BaseModel, read_base_model
from adapters.base_names import is_same_model, model_id, quantization_note, suggested_alias
from adapters.errors import BaseMismatch, UnsupportedEngine
from gateway.config.settings import Settings
from gateway.triton.model_capabilities import ModelCapabilities


class Conversion(NamedTuple):
    """An adapter as engines take it, and what whoever adds it should know."""

    converted: Converted
    notes: tuple[str, ...] = ()


class _Read(NamedTuple):
    """A converted adapter, what it says that it was trained on, and whether it is all zeros."""

    converted: Converted
    trained_on: str | None
    changes_nothing: bool


class Converter:
    """Runs in a thread, one adapter at a time."""

    def __init__(
        self, settings: Settings, capabilities: Callable[[], Sequence[ModelCapabilities]]
    ) -> None:
        """`capabilities` are those of each kind of replicas that is there."""
        self._settings = settings
        self._capabilities = capabilities
        self.aliases: Sequence[str] = ()
        """Aliases of the configuration file; GATEWAY_BASE_MODEL_ALIASES has more."""
        self._turn = asyncio.Lock()

    def _base_of(self) -> ModelCapabilities:
        """Those of the kind that says what an adapter must be: one with an engine, which knows its
        own limits and type, before one that reads adapters of any type from its disk."""
        served = self._capabilities()
        sent = (each for each in served if each.lora_dtype is not None)
        disks = (each for each in served if each.reads_adapters)
        return next(sent, None) or next(disks, served[0])

    @property
    def _aliases(self) -> tuple[str, ...]:
        return (*self._settings.base_model_aliases, *self.aliases)

    def is_base(self, name: str) -> bool:
        """Return True if a request may name the base model so."""
        served = self._settings.model_name
        return name == served or any(is_same_model(name, alias) for alias in self._aliases)

    @property
    def base_names(self) -> str:
        """Return the names that a request may give the base model, for people."""
        return ", ".join((self._settings.model_name, *self._aliases))

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
        tokenizer = model_id(str(self._settings.tokenizer_dir.resolve()))[1]
        names = (self._settings.model_name, tokenizer, *self._aliases)
        return read_base_model(folder, names, dtype=capabilities.lora_dtype)

    async def convert(self, folder: Path, *, within: Path | None) -> Conversion:
        """The adapter in `folder` as engines take it, of PEFT or npy files.

        Every file must really lie inside `within`. Raises subclasses of AdapterError.
        """
        base = self.base_model()
        limit = self._settings.max_adapter_bytes
        # One at a time: a conversion holds the whole adapter in memory.
        back = any(each.reads_adapters for each in self._capabilities())
        async with self._turn:
            try:
                read = await asyncio.to_thread(_read, folder, base, within, limit, back)
            except BaseMismatch as error:
                raise _with_advice(error) from None
        own = [name for name in base.names if name not in self._aliases]
        return Conversion(read.converted, tuple(_notes(read, own)))


def _notes(read: _Read, own_names: Sequence[str]) -> Iterator[str]:
    """Yield what to tell of an adapter that is served all the same."""
    if note := quantization_note(read.trained_on or "", own_names):
        yield note
    if read.changes_nothing:
        yield "A or B of all its modules is zero: the adapter answers as the base model does"


def _with_advice(error: BaseMismatch) -> BaseMismatch:
    """Return the same refusal with the setting that lifts it."""
    alias = suggested_alias(error.trained_on)
    if alias is None:
        why = f"if it is the same model, write one of these into {error.field}"
    else:
        value = json.dumps([alias], ensure_ascii=False)
        why = (
            f"if it is the same model, set GATEWAY_BASE_MODEL_ALIASES='{value}' or, in the file of "
            f"GATEWAY_CONFIG, base_model_aliases: {value}"
        )
    return error.with_reason(why)


def _read(folder: Path, base: BaseModel, within: Path | None, limit: int, back: bool) -> _Read:
    """Read and convert an adapter. `back` says that it must have a PEFT form, too."""
    # numpy is needed for conversion alone; serving does without.
    from adapters import convert, npy, peft_files  # noqa: PLC0415

    named: str | None = None
    if (folder / npy_files.WEIGHTS).exists() and not (folder / peft.CONFIG).exists():
        converted = npy.read(folder, base, within=within, max_bytes=limit)
    else:
        adapter = peft.read(folder, within=within, max_bytes=limit)
        converted = convert.convert(adapter, base)
        named = adapter.settings.base_model_name_or_path
    if back:
        peft_files.peft_files(converted, base)
    return _Read(converted, named, peft_files.changes_nothing(converted, base))

"""Conversion of LoRA adapters to the format of the engines."""

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
    """An adapter in the engines' format, with remarks for the operator about possible mistakes."""

    converted: Converted
    notes: tuple[str, ...] = ()


class _ReadAdapter(NamedTuple):
    """A converted adapter.

    Attributes:
        converted: the adapter in the engines' format.
        trained_on: name of the base model in the adapter's configuration; None if unknown.
        changes_nothing: True if the adapter has no effect, because matrix A or B of each module is
            zero.
    """

    converted: Converted
    trained_on: str | None
    changes_nothing: bool


class Converter:
    """Converter of adapters to the engines' format.

    Adapters are converted in a thread, one at a time.
    """

    def __init__(
        self, settings: Settings, capabilities: Callable[[], Sequence[ModelCapabilities]]
    ) -> None:
        """Create the converter.

        Args:
            settings: the settings of this process.
            capabilities: returns the capabilities of each model variant (group of equal replicas).
        """
        self._settings = settings
        self._capabilities = capabilities
        self.aliases: Sequence[str] = ()
        """Aliases of the base model in the configuration file.

        The aliases in GATEWAY_BASE_MODEL_ALIASES apply as well.
        """
        self._lock = asyncio.Lock()

    def _reference_capabilities(self) -> ModelCapabilities:
        """Return the capabilities of the model variant that determines the format of adapters.

        Prefer a variant to which adapters are uploaded, because it requires a certain data type. A
        variant that reads adapters from disk accepts any data type.
        """
        served = self._capabilities()
        sent = (each for each in served if each.lora_dtype is not None)
        disks = (each for each in served if each.reads_adapters)
        return next(sent, None) or next(disks, served[0])

    @property
    def _aliases(self) -> tuple[str, ...]:
        return (*self._settings.base_model_aliases, *self.aliases)

    def is_base(self, name: str) -> bool:
        """Return True if `name` is the base model's name or one of its aliases."""
        served = self._settings.model_name
        return name == served or any(is_same_model(name, alias) for alias in self._aliases)

    @property
    def base_names(self) -> str:
        """The base model's name and aliases, separated by commas, for messages."""
        return ", ".join((self._settings.model_name, *self._aliases))

    def base_model(self) -> BaseModel:
        """Return the base model that an adapter has to fit.

        Raises:
            UnsupportedEngine: no engine supports adapters.
            AdapterError: the base model's files cannot be used.
            EngineUnavailable: no replica is ready.
        """
        capabilities = self._reference_capabilities()
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
        # If the engine's folder is not on this host, read config.json from the tokenizer's folder.
        # Both config.json files have the model's shapes.
        folders = (capabilities.engine_dir, self._settings.tokenizer_dir)
        folder = next((f for f in folders if (f / "config.json").is_file()), folders[0])
        # Accept the name of the tokenizer's folder as a name of the base model, because adapters
        # often use this name.
        tokenizer = model_id(str(self._settings.tokenizer_dir.resolve()))[1]
        names = (self._settings.model_name, tokenizer, *self._aliases)
        return read_base_model(folder, names, dtype=capabilities.lora_dtype)

    async def convert(self, folder: Path, *, within: Path | None) -> Conversion:
        """Convert the adapter in `folder`, which has PEFT or npy files.

        All files must be inside the folder `within`, also the targets of symbolic links. If
        `within` is None, this is not checked. Raise a subclass of AdapterError if the adapter is
        invalid or does not fit the base model.
        """
        base = self.base_model()
        limit = self._settings.max_adapter_bytes
        # Convert only one adapter at a time, because each conversion needs memory for a complete
        # adapter.
        back = any(each.reads_adapters for each in self._capabilities())
        async with self._lock:
            try:
                read = await asyncio.to_thread(_read_adapter, folder, base, within, limit, back)
            except BaseMismatch as error:
                raise _with_advice(error) from None
        own = [name for name in base.names if name not in self._aliases]
        return Conversion(read.converted, tuple(_notes(read, own)))


def _notes(read: _ReadAdapter, own_names: Sequence[str]) -> Iterator[str]:
    """Yield notes for the operator about possible mistakes in an accepted adapter."""
    if note := quantization_note(read.trained_on or "", own_names):
        yield note
    if read.changes_nothing:
        yield "A or B of all its modules is zero: the adapter answers as the base model does"


def _with_advice(error: BaseMismatch) -> BaseMismatch:
    """Return a copy of `error` with advice for the operator.

    The base model in the adapter's configuration may be the served model under another name. The
    advice is to declare this name as an alias, or to correct it in the adapter's configuration.
    """
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


def _read_adapter(
    folder: Path, base: BaseModel, within: Path | None, limit: int, back: bool
) -> _ReadAdapter:
    """Read and convert an adapter.

    If `back` is True, also check that the result can be converted back to PEFT files.
    """
    # Import here, because these modules import numpy, which a gateway without adapters need not
    # load.
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
    return _ReadAdapter(converted, named, peft_files.changes_nothing(converted, base))

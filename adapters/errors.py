"""Errors for refused adapters, and errors of the store of converted adapters.

Every `AdapterError` states four facts: the file, the field in the file, the value found and the
values allowed. `code` is a stable identifier for programs. The message is for people: by default
"<file>: <field>: found ...; allowed: ...". If the argument `says` is given, the message is
"<file>: <says>" instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

_SHOWN = 200


def _short(value: object) -> str:
    """Return a value as one short printable line for a message.

    The author of an adapter may have chosen the value, so it may be long or have control
    characters.
    """
    text = value if isinstance(value, str) else repr(value)
    if len(text) > _SHOWN:
        text = f"{text[:_SHOWN]}..."
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)


class AdapterError(Exception):
    """Base class of the errors for a refused adapter, adapter name, adapter source or engine."""

    code: ClassVar[str] = "adapter_refused"

    def __init__(
        self,
        file: str,
        field: str,
        found: object,
        allowed: object,
        why: str = "",
        *,
        says: str = "",
    ) -> None:
        self.file = file
        self.field = _short(field)
        self.found = _short(found)
        self.allowed = _short(allowed)
        reason = f" ({why})" if why else ""
        text = says or f"{self.field}: found {self.found}; allowed: {self.allowed}{reason}"
        super().__init__(f"{file}: {text}")


class MissingFile(AdapterError):
    """A file of the adapter is missing or cannot be read."""

    code = "adapter_file_missing"


class PickleRefused(AdapterError):
    """The weights exist only as a pickle. Pickles are refused: loading a pickle can run code."""

    code = "adapter_pickle_refused"


class CorruptFile(AdapterError):
    """A file is truncated, malformed or contradicts itself."""

    code = "adapter_file_corrupt"


class TooLarge(AdapterError):
    """The adapter, or a part of it, exceeds a size limit."""

    code = "adapter_too_large"


class PathEscape(AdapterError):
    """A path leads out of the folder that adapters may come from."""

    code = "adapter_path_outside_root"


class UnsupportedFeature(AdapterError):
    """The adapter uses a feature that TensorRT-LLM's LoRA tensors cannot represent."""

    code = "adapter_feature_unsupported"


class UnsupportedModule(AdapterError):
    """The adapter changes a module that the engine, or TensorRT-LLM's LoRA, does not support."""

    code = "adapter_module_unsupported"


class IncompleteAdapter(AdapterError):
    """A `lora_A` tensor has no `lora_B`, or the reverse, or there are no LoRA tensors at all."""

    code = "adapter_incomplete"


class InvalidRank(AdapterError):
    """The rank exceeds the engine's maximum, or differs between tensors that must share one rank.

    A and B of one module must have the same rank. All experts of one layer must also have the same
    rank.
    """

    code = "adapter_rank_invalid"


class ShapeMismatch(AdapterError):
    """The shape of a tensor, or the length of a row of `lora_weights`, does not fit the model."""

    code = "adapter_shape_mismatch"


class LayerOutOfRange(AdapterError):
    """A tensor belongs to a layer that the base model does not have."""

    code = "adapter_layer_out_of_range"


class NotFinite(AdapterError):
    """A value is NaN or infinite, or becomes infinite in the engine's data type."""

    code = "adapter_not_finite"


class BaseMismatch(AdapterError):
    """The adapter was made for another base model than the model that is served."""

    code = "adapter_base_mismatch"

    def __init__(self, file: str, field: str, name: str, allowed: str, why: str = "") -> None:
        super().__init__(file, field, name, allowed, why)
        self.trained_on = name
        self._facts = (file, field, name, allowed)

    def with_reason(self, why: str) -> BaseMismatch:
        """Return an equal error with the reason `why` added."""
        return BaseMismatch(*self._facts, why)


class UnsupportedEngine(AdapterError):
    """The base model's configuration cannot be read, or the engine does not support LoRA."""

    code = "engine_takes_no_lora"


class InvalidName(AdapterError):
    """The name is malformed, or another model of this gateway has the name."""

    code = "adapter_name_invalid"


class UnknownAdapter(AdapterError):
    """No adapter has this name."""

    code = "adapter_not_found"


class UnknownVersion(AdapterError):
    """The adapter does not have the requested version.

    No version has a digest that begins with the requested digest, or several versions have one. A
    rollback without a digest also raises this error if no version was served earlier.
    """

    code = "adapter_version_not_found"


class InvalidSource(AdapterError):
    """The source that a request names for an adapter is not a valid path or URL."""

    code = "adapter_source_invalid"


class SourceNotAllowed(AdapterError):
    """The source, or an address to which the source redirects, is not an allowed source."""

    code = "adapter_source_not_allowed"


class SourceUnavailable(AdapterError):
    """The source does not respond, refuses, or is too slow. A later attempt may succeed."""

    code = "adapter_source_unavailable"


class SourceUnsupported(AdapterError):
    """A package that this type of source needs, such as s3fs for S3, is not installed."""

    code = "adapter_source_unsupported"


class StoreError(Exception):
    """The store of converted adapters failed. The request itself is valid."""

    code: ClassVar[str] = "adapter_store_error"


@contextmanager
def store_errors(folder: str) -> Iterator[None]:
    """Convert an `OSError` in the ``with`` block to a `StoreError` that names the folder."""
    try:
        yield
    except OSError as error:
        raise StoreError(f"{folder} fails: {error.strerror}") from error


class StoreUnavailable(StoreError):
    """A part of the store, such as Redis, does not respond.

    The store recovers by itself: a later attempt may succeed.
    """

    code = "adapter_store_unavailable"


class WritesRefused(StoreError):
    """Redis responds but refuses writes now, for example because its memory is full."""


class ChangeUnknown(StoreError):
    """The gateway does not know whether the change of an adapter name took effect.

    Redis did not confirm the change, and writing the change to the disk failed.
    """

    code = "adapter_change_unknown"

    def __init__(self, name: str, disk: OSError) -> None:
        super().__init__(
            f"whether adapter {name} was changed is not known, look before you try again: Redis "
            f"did not say, and the adapter folder fails: {disk.strerror}"
        )


class VersionUnavailable(StoreError):
    """A version has no intact copy, neither on this machine's disk nor in Redis."""

    code = "adapter_version_unavailable"

    def __init__(self, digest: str, reason: str) -> None:
        self.digest = digest
        super().__init__(f"adapter version {digest[:12]} cannot be read: {reason}")

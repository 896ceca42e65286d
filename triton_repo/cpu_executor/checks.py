"""Argument conversion and checks like those of TensorRT-LLM's Python bindings.

The real classes are C++ behind pybind11. Arguments are converted by their type:

- int: an object with ``__index__``, or an array with one such element.
- float: a number.
- bool: any object, including ``None``.
- duration: a ``datetime.timedelta``, or a float in seconds.

A failed check raises a ``RuntimeError`` whose text begins with
``[TensorRT-LLM][ERROR] Assertion failed:``. A wrong type raises a ``TypeError``.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any, Generic, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

T = TypeVar("T")

PREFIX = "[TensorRT-LLM][ERROR] Assertion failed: "


def check(condition: bool, text: str) -> None:
    """Raise ``RuntimeError`` with TensorRT-LLM's prefix unless ``condition`` holds."""
    if not condition:
        raise RuntimeError(PREFIX + text)


def as_int(value: Any) -> int:
    """Convert an object with ``__index__``, or an array with one such element, to int.

    Refuse floats.
    """
    if isinstance(value, np.ndarray) and value.size == 1:
        value = value.item()
    return operator.index(value)


def as_float(value: Any) -> float:
    """Convert a number to float, rounded to float32 because the C++ classes store float32."""
    if isinstance(value, str | bytes):
        raise TypeError(f"incompatible argument: expected a float, found {value!r}")
    return float(np.float32(value))


def as_bool(value: Any) -> bool:
    """Convert any object to its truth value; ``None`` becomes False."""
    return bool(value)


def as_str(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"incompatible argument: expected a str, found {value!r}")
    return value


def as_ints(value: Iterable[Any]) -> list[int]:
    """Convert an iterable to a list of int32 values, such as token ids."""
    ints = list(map(operator.index, value))
    if ints and (min(ints) < -(2**31) or max(ints) >= 2**31):
        raise TypeError("incompatible argument: expected int32 values")
    return ints


def as_words(value: Iterable[Iterable[Any]]) -> list[list[int]]:
    """Convert nested iterables to a list of words, each a list of token ids."""
    return [as_ints(word) for word in value]


def as_duration(value: Any) -> timedelta:
    """Convert a ``timedelta`` or float seconds to a ``timedelta``. Refuse int, as pybind11 does."""
    if isinstance(value, timedelta):
        return value
    if isinstance(value, float):
        return timedelta(seconds=value)
    raise TypeError(f"incompatible argument: expected timedelta or float seconds, found {value!r}")


def as_tensor(value: Any) -> NDArray[Any]:
    """Convert anything that ``numpy.asarray`` accepts, including CPU torch tensors, to an array."""
    array: NDArray[Any] = np.asarray(value)
    if array.dtype == object:
        raise TypeError(f"incompatible argument: expected a tensor, found {type(value).__name__}")
    return array


def optional(convert: Callable[[Any], T]) -> Callable[[Any], T | None]:
    """Return a converter that converts like ``convert``, and returns None for None."""

    def converter(value: Any) -> T | None:
        return None if value is None else convert(value)

    return converter


class Field(Generic[T]):
    """A read-write property that converts and checks assigned values.

    ``convert`` converts an assigned value. ``test`` checks the converted value: it returns None if
    the value is valid, else the violated condition as text.
    """

    def __init__(
        self, convert: Callable[[Any], T], test: Callable[[T], str | None] | None = None
    ) -> None:
        self._convert = convert
        self._test = test

    def __set_name__(self, owner: type, name: str) -> None:
        self._slot = "_" + name

    @overload
    def __get__(self, instance: None, owner: type) -> Field[T]: ...
    @overload
    def __get__(self, instance: object, owner: type) -> T: ...
    def __get__(self, instance: object | None, owner: type) -> T | Field[T]:
        if instance is None:
            return self
        value: T = getattr(instance, self._slot)
        return value

    def __set__(self, instance: object, value: Any) -> None:
        converted = self._convert(value)
        if self._test is not None and (text := self._test(converted)) is not None:
            check(False, text)
        setattr(instance, self._slot, converted)


class ReadOnly(Field[T]):
    """A property that only the constructor sets."""

    def __set__(self, instance: object, value: Any) -> None:
        if hasattr(instance, self._slot):
            raise AttributeError(f"can't set attribute '{self._slot[1:]}'")
        super().__set__(instance, value)

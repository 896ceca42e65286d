"""The adapters that the configuration file declares."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from adapters.base_names import MAX_ALIASES, alias_problem
from adapters.errors import InvalidName, InvalidSource
from adapters.record import check_name
from gateway.sources.source import parse


def _name(name: str) -> str:
    try:
        return check_name(name)
    except InvalidName as error:
        raise ValueError(f"must be {error.allowed}") from None


def _source(source: str) -> str:
    try:
        parse(source)
    except InvalidSource as error:
        raise ValueError(f"found {error.found}; must be {error.allowed}") from None
    return source


def _folder(folder: str) -> str:
    if not Path(folder).is_absolute():
        raise ValueError("must be an absolute folder")
    return folder


def _alias(alias: str) -> str:
    if problem := alias_problem(alias):
        raise ValueError(problem)
    return alias


Aliases = Annotated[list[Annotated[str, AfterValidator(_alias)]], Field(max_length=MAX_ALIASES)]
Folder = Annotated[str, AfterValidator(_folder)]
AdapterName = Annotated[str, AfterValidator(_name)]


class DeclaredAdapter(BaseModel):
    """`source` is any that `gateway.sources` knows, whatever GATEWAY_ADAPTER_SOURCES allows.

    `watch` says that a change on this machine's disk is taken without a reload.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)
    name: AdapterName
    source: Annotated[str, AfterValidator(_source), Field(repr=False)]
    watch: bool = False

    @property
    def may_be_watched(self) -> bool:
        return parse(self.source).scheme in ("file", "hf")

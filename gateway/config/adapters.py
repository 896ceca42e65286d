"""Entries of the configuration file for LoRA adapters that the gateway itself loads."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from adapters.base_names import MAX_ALIASES, alias_problem
from adapters.errors import InvalidName, InvalidSource
from adapters.record import check_name
from gateway.sources.source import parse


def _check_name(name: str) -> str:
    try:
        return check_name(name)
    except InvalidName as error:
        raise ValueError(f"must be {error.allowed}") from None


def _check_source(source: str) -> str:
    try:
        parse(source)
    except InvalidSource as error:
        raise ValueError(f"found {error.found}; must be {error.allowed}") from None
    return source


def _check_folder(folder: str) -> str:
    if not Path(folder).is_absolute():
        raise ValueError("must be an absolute folder")
    return folder


def _check_alias(alias: str) -> str:
    if problem := alias_problem(alias):
        raise ValueError(problem)
    return alias


Aliases = Annotated[
    list[Annotated[str, AfterValidator(_check_alias)]], Field(max_length=MAX_ALIASES)
]
Folder = Annotated[str, AfterValidator(_check_folder)]
AdapterName = Annotated[str, AfterValidator(_check_name)]


class DeclaredAdapter(BaseModel):
    """A LoRA adapter that the gateway loads from `source`.

    The setting GATEWAY_ADAPTER_SOURCES restricts only the sources that admins may load over the
    API, not this source.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)
    name: AdapterName = Field(
        description="Name for clients, NAME or TENANT/NAME. Each part has 1 to 64 of `A-Z a-z 0-9 "
        ". _ -`, without `..`."
    )
    source: Annotated[str, AfterValidator(_check_source)] = Field(
        repr=False,
        description="Absolute folder, `https://HOST/FOLDER`, `s3://BUCKET/FOLDER` or "
        "`hf://OWNER/NAME@REVISION`.",
    )
    watch: bool = Field(
        default=False,
        description="Whether changes of the source are applied without a reload; only for sources "
        "on the gateway's disk (a folder, `hf://`).",
    )

    @property
    def may_be_watched(self) -> bool:
        """True if the source is on this machine's disk, so that `watch` is allowed."""
        return parse(self.source).scheme in ("file", "hf")

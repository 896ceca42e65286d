"""``DecodingConfig`` and ``DecodingMode`` (``tensorrt_llm.bindings.executor``, v0.17)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from triton_repo.cpu_executor.checks import Field, optional
from triton_repo.cpu_executor.request_config import EagleConfig, LookaheadDecodingConfig


class DecodingMode:
    """A decoding mode. The static methods, such as ``DecodingMode.TopK()``, create one."""

    def __init__(self, name: str) -> None:
        self._name = name

    @staticmethod
    def Auto() -> DecodingMode:
        return DecodingMode("Auto")

    @staticmethod
    def TopK() -> DecodingMode:
        return DecodingMode("TopK")

    @staticmethod
    def TopP() -> DecodingMode:
        return DecodingMode("TopP")

    @staticmethod
    def TopKTopP() -> DecodingMode:
        return DecodingMode("TopKTopP")

    @staticmethod
    def BeamSearch() -> DecodingMode:
        return DecodingMode("BeamSearch")

    @staticmethod
    def Medusa() -> DecodingMode:
        return DecodingMode("Medusa")

    @staticmethod
    def ExplicitDraftTokens() -> DecodingMode:
        return DecodingMode("ExplicitDraftTokens")

    @staticmethod
    def Lookahead() -> DecodingMode:
        return DecodingMode("Lookahead")

    @staticmethod
    def Eagle() -> DecodingMode:
        return DecodingMode("Eagle")

    @property
    def name(self) -> str:
        return self._name

    def isAuto(self) -> bool:
        return self._name == "Auto"

    def isTopK(self) -> bool:
        return self._name in ("TopK", "TopKTopP")

    def isTopP(self) -> bool:
        return self._name in ("TopP", "TopKTopP")

    def isTopKorTopP(self) -> bool:
        return self._name in ("TopK", "TopP", "TopKTopP")

    def isTopKandTopP(self) -> bool:
        return self._name == "TopKTopP"

    def isBeamSearch(self) -> bool:
        return self._name == "BeamSearch"

    def isMedusa(self) -> bool:
        return self._name == "Medusa"

    def isLookahead(self) -> bool:
        return self._name == "Lookahead"

    def isExplicitDraftTokens(self) -> bool:
        return self._name == "ExplicitDraftTokens"

    def isEagle(self) -> bool:
        return self._name == "Eagle"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DecodingMode) and self._name == other._name

    def __hash__(self) -> int:
        return hash(self._name)

    def __repr__(self) -> str:
        return f"DecodingMode.{self._name}()"


class DecodingConfig:
    decoding_mode = Field[DecodingMode | None](lambda value: value)
    lookahead_decoding_config = Field[LookaheadDecodingConfig | None](lambda value: value)
    medusa_choices = Field[Any](optional(list))
    eagle_config = Field[EagleConfig | None](lambda value: value)

    def __init__(
        self,
        decoding_mode: DecodingMode | None = None,
        lookahead_decoding_config: LookaheadDecodingConfig | None = None,
        medusa_choices: Iterable[Iterable[int]] | None = None,
        eagle_config: EagleConfig | None = None,
    ) -> None:
        self.decoding_mode = decoding_mode
        self.lookahead_decoding_config = lookahead_decoding_config
        self.medusa_choices = medusa_choices
        self.eagle_config = eagle_config

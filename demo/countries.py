"""The world's countries and capitals in English, Chinese and Japanese.

The table ``countries.tsv`` has one line per state: the 193 members and the two observers of the
United Nations. English capitals are written without accents.
"""

from dataclasses import dataclass
from functools import cache
from pathlib import Path

TABLE = Path(__file__).with_name("countries.tsv")
LANGUAGES = ("en", "zh", "ja")


@dataclass(frozen=True)
class Country:
    """A state, with its names and its capital by language. The most common name is the first."""

    names: dict[str, tuple[str, ...]]
    capital: dict[str, str]

    def name(self, language: str) -> str:
        return self.names[language][0]


@cache
def countries() -> tuple[Country, ...]:
    """Return the 195 states in the order of the table."""
    rows = [line.split("\t") for line in TABLE.read_text(encoding="utf-8").splitlines()]
    return tuple(
        Country(
            names={lang: tuple(row[2 * i].split("/")) for i, lang in enumerate(LANGUAGES)},
            capital={lang: row[2 * i + 1] for i, lang in enumerate(LANGUAGES)},
        )
        for row in rows
    )

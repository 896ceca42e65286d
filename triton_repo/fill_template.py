"""Replace `${name}` in a config.pbtxt by values from `key:value,key:value`.

The command works like tools/fill_template.py of tensorrtllm_backend v0.16 and later, and has the
same escape sequences: a backslash makes the next character literal. The text is split twice, first
at commas and then at colons. Therefore write a comma in a value as `\\,` and a colon as `\\\\:`.

If no value is given for a key, `${name}` stays in the file. If the parameter is a string, both
Triton backends for TensorRT-LLM treat it as unset. If it is a number, Triton cannot parse the file.

    python -m triton_repo.fill_template [-i] FILE "key:value,key:value"
"""

import argparse
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from string import Template

PRESET: Mapping[str, str] = {
    "max_queue_size": "0",
    "max_queue_delay_microseconds": "0",
}


class SubstitutionError(ValueError):
    """The text does not have the format `key:value,key:value`."""


def parse_substitutions(text: str) -> dict[str, str]:
    """Parse `key:value,key:value` to a mapping. If a key is repeated, its last value is used.

    Raises SubstitutionError if an item between two commas does not have exactly one colon.
    """
    values: dict[str, str] = {}
    for part in _split(text, ",") if text else ():
        pair = _split(part, ":")
        if len(pair) != 2:
            raise SubstitutionError(
                f"{part!r}: found {len(pair) - 1} colons; allowed: key:value. "
                "Write a comma in a value as \\, and a colon as \\\\:"
            )
        values[pair[0]] = pair[1]
    return values


def fill(template: str, values: Mapping[str, str]) -> str:
    """Return the template's text with the values filled in.

    `PRESET` has default values for keys that are missing in `values`.
    """
    return Template(template).safe_substitute({**PRESET, **values})


def unknown_keys(template: str, values: Mapping[str, str]) -> list[str]:
    """Return the keys of `values` that do not occur in the template.

    Upstream's fill_template.py refuses such keys since v0.19.
    """
    read = re.sub(r"(?m)^ *#.*$", "", template)
    return [key for key in values if key not in read]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, metavar="FILE", help="a config.pbtxt")
    parser.add_argument("substitutions", metavar="KEY:VALUE,KEY:VALUE")
    parser.add_argument(
        "-i", "--in_place", "--in-place", action="store_true", help="write FILE instead of stdout"
    )
    parser.add_argument(
        "--strict", action="store_true", help="refuse keys that FILE does not have, as v0.19 does"
    )


def run(parsed: argparse.Namespace) -> int:
    """Fill one file. Return the exit code: 1 for an unreadable file or wrong substitutions."""
    try:
        values = parse_substitutions(parsed.substitutions)
        template = parsed.file.read_text(encoding="utf-8")
        unknown = unknown_keys(template, values)
        for key in unknown:
            print(f"{parsed.file}: key {key!r} does not exist in the file", file=sys.stderr)
        for key, value in values.items():
            if value != value.strip():
                print(
                    f"{parsed.file}: {key}: found {value!r}, which begins or ends with a blank "
                    "that the model reads, too",
                    file=sys.stderr,
                )
        if unknown and parsed.strict:
            return 1
        filled = fill(template, values)
        if parsed.in_place:
            parsed.file.write_text(filled, encoding="utf-8")
        else:
            print(filled)
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _split(text: str, delimiter: str) -> list[str]:
    parts, escaped = [""], False
    for character in text:
        if escaped:
            parts[-1] += character
            escaped = False
        elif character == "\\":
            escaped = True
        elif character == delimiter:
            parts.append("")
        else:
            parts[-1] += character
    return parts


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Fills the templates of a config.pbtxt.")
    add_arguments(parser)
    return run(parser.parse_args(arguments))


if __name__ == "__main__":
    sys.exit(main())

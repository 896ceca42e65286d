"""Reference sections for the configuration file and the command line, used by `docs.generate`."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from unittest.mock import patch

from gateway.config.file import Configuration
from ops.cli import COMMANDS

Schema = Mapping[str, Any]
"""Part of a JSON schema that pydantic generates for a model."""

# Environment variables that are defaults of options. The page shows their names instead of their
# values on this machine.
_VARIABLES = ("GATEWAY_CONFIG", "GATEWAY_URL", "OPENAI_API_KEY")
_STATED_DEFAULT = re.compile(r" ?\(default: ([^()]*)\)|^default: (.*)$")
_TOP_LEVEL = "Top level"
_BOOLEANS = ("true", "false")


def format_table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a Markdown table with the column headers `head`."""
    columns = list(head)
    lines = [columns, ["---"] * len(columns), *rows]
    return "".join(
        "|" + "".join(f" {cell} |" if cell else " |" for cell in cells) + "\n" for cells in lines
    )


def format_configuration() -> str:
    """Return Markdown with a section for each object of the configuration file.

    A section has a table of the object's keys.
    """
    schema = Configuration.model_json_schema()
    return "\n".join(
        _format_object(path, each) for path, each in _find_objects("", schema, schema["$defs"])
    )


def _find_objects(path: str, schema: Schema, definitions: Schema) -> Iterator[tuple[str, Schema]]:
    """Yield an object and the objects in it, each with its key's path, such as ``limits.x``."""
    yield path, schema
    for key, field in schema["properties"].items():
        for name in _find_references(field):
            yield from _find_objects(_join(path, key), definitions[name], definitions)


def _find_references(part: object) -> Iterator[str]:
    """Yield the names of the objects that `part` of a schema refers to."""
    if isinstance(part, Mapping):
        if "$ref" in part:
            yield str(part["$ref"]).removeprefix("#/$defs/")
        part = list(part.values())
    if isinstance(part, list):
        for each in part:
            yield from _find_references(each)


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _format_object(path: str, schema: Schema) -> str:
    """Return the section of an object. The object's docstring is the introduction.

    Raises ValueError for a field without a description.
    """
    rows = []
    for key, field in schema["properties"].items():
        if "description" not in field:
            raise ValueError(f"{_join(path, key)}: has no description; give its Field one")
        default = field.get("default")
        # Write booleans as in YAML, in lower case.
        shown = f"`{default}`".lower() if isinstance(default, bool) else _format_value(default)
        shown = "required" if key in schema.get("required", ()) else shown
        noun, bounds = _describe_type(field, _join(path, key))
        values = f"{noun}, {bounds}" if noun and bounds else noun + bounds
        rows.append((f"`{key}`", _escape_bars(values), shown, _escape_bars(field["description"])))
    title = f"`{path}`" if path else _TOP_LEVEL
    introduction = schema["description"].replace("``", "`")
    table = format_table(("key", "value", "default", "meaning"), rows)
    return f"## {title}\n\n{introduction}\n\n{table}"


def _describe_type(field: Schema, path: str) -> tuple[str, str]:
    """Return a noun for the values of a field, and the bounds of the values.

    Either may be empty.
    """
    if "$ref" in field:
        return f"[object](#{path.replace('.', '')})", ""
    if "anyOf" in field:
        return _describe_type(next(p for p in field["anyOf"] if p.get("type") != "null"), path)
    if choices := _BOOLEANS if field["type"] == "boolean" else field.get("enum", ()):
        return "", ", ".join(f"`{choice}`" for choice in choices)
    if field["type"] == "array":
        noun, bounds = _describe_type(field["items"], path)
        most = f", at most {field['maxItems']}" if "maxItems" in field else ""
        return f"list of {_plural(noun)}{most}", bounds and f"each {bounds}"
    if field["type"] == "object":
        noun, _ = _describe_type(field["additionalProperties"], path)
        return f"mapping of names to {_plural(noun)}", ""
    return str(field["type"]), _describe_bounds(field)


def _plural(noun: str) -> str:
    return noun.replace("]", "s]") if "]" in noun else f"{noun}s"


def _describe_bounds(field: Schema) -> str:
    if "pattern" in field:
        return f"`{field['pattern']}`"
    if "maxLength" in field:
        return f"{field['minLength']} to {field['maxLength']} characters"
    if "maximum" in field:
        return f"{field['minimum']:,.15g} to {field['maximum']:,.15g}"
    if "exclusiveMinimum" in field:
        return f"greater than {field['exclusiveMinimum']:,.15g}"
    return f"{field['minimum']:,.15g} or more" if "minimum" in field else ""


def format_commands() -> str:
    """Return Markdown with a section for each command of `gateway`: usage and options."""
    sections: list[str] = []
    names = {name: f"${name}" for name in _VARIABLES}
    with patch.dict(os.environ, names, clear=True):
        commands = argparse.ArgumentParser(prog="gateway").add_subparsers()
        for name, module, text in COMMANDS:
            parser = commands.add_parser(name)
            module.add_arguments(parser)
            sections += _format_parser(parser, text, "##")
    return "\n".join(sections)


def _format_parser(parser: argparse.ArgumentParser, text: str, heading: str) -> Iterator[str]:
    """Yield the sections of a command and of its subcommands.

    Args:
        parser: the command's parser.
        text: the introduction of a command without a description.
        heading: the `#` characters of the heading's level.
    """
    shown = [a for a in parser._actions if a.dest != "help" and a.help != argparse.SUPPRESS]
    nested = [a for a in shown if isinstance(a, argparse._SubParsersAction)]
    alternatives = _find_alternatives(parser)
    rows = [
        (_format_names(action), *_describe_action(action, alternatives.get(action.dest, "")))
        for action in sorted(shown, key=lambda action: bool(action.option_strings))
        if action not in nested
    ]
    introduction = _escape(parser.description or f"{text[:1].upper()}{text[1:]}.")
    section = f"{heading} {parser.prog}\n\n{introduction}\n\n"
    section += f"```text\n{_format_usage(parser, shown)}\n```\n"
    if rows:
        section += "\n" + format_table(("option", "default", "meaning"), rows)
    yield section
    for action in nested:
        for each in action._choices_actions:
            yield from _format_parser(action.choices[each.dest], each.help or "", "###")


def _find_alternatives(parser: argparse.ArgumentParser) -> dict[str, str]:
    """Return the alternatives of each option that belongs to a required exclusive group.

    The key is the option's destination, the value is text with the names of the other options.
    """
    return {
        action.dest: " or ".join(
            f"`{other.option_strings[-1]}`" for other in group._group_actions if other != action
        )
        for group in parser._mutually_exclusive_groups
        if group.required
        for action in group._group_actions
    }


def _format_usage(parser: argparse.ArgumentParser, actions: Iterable[argparse.Action]) -> str:
    """Return the command with its required arguments. `[OPTION ...]` stands for all others."""
    groups = [group for group in parser._mutually_exclusive_groups if group.required]
    grouped = [action for group in groups for action in group._group_actions]
    options = [action for action in actions if action.option_strings and action not in grouped]
    words = [parser.prog]
    if not all(action.required for action in options):
        words.append("[OPTION ...]")
    words += [_format_option(action) for action in options if action.required]
    words += [f"({' | '.join(map(_format_option, group._group_actions))})" for group in groups]
    words += [_format_argument(action) for action in actions if not action.option_strings]
    return " ".join(words)


def _format_option(action: argparse.Action) -> str:
    """Return the name of an option, with its argument."""
    return f"{action.option_strings[-1]} {_format_argument(action)}".rstrip()


def _format_names(action: argparse.Action) -> str:
    """Return the names of an option, or the name of a positional argument, as code."""
    # Leave out names with underscores, which exist for every option with dashes.
    names = [n for n in action.option_strings if not (n.startswith("--") and "_" in n)]
    if not names:
        return f"`{_format_argument(action)}`"
    names[-1] = f"{names[-1]} {_format_argument(action)}".rstrip()
    return ", ".join(f"`{name}`" for name in names)


def _format_argument(action: argparse.Action) -> str:
    """Return the placeholder of an argument; "" for an option without an argument."""
    if action.nargs == 0:
        return ""
    if action.metavar is None and action.choices is not None:
        name = f"{{{','.join(map(str, action.choices))}}}"
    else:
        name = str(action.metavar or action.dest.upper())
    if action.nargs == argparse.ZERO_OR_MORE:
        return f"[{name} ...]"
    if action.nargs == argparse.ONE_OR_MORE:
        return f"{name} ..."
    return f"[{name}]" if action.nargs == argparse.OPTIONAL else name


def _describe_action(action: argparse.Action, alternatives: str) -> tuple[str, str]:
    """Return the default and the description of an argument.

    If the help text states a default, it is removed from the description and returned as the
    default.
    """
    text = (action.help or "") % vars(action)
    value, stated = _format_value(action.default), ""
    if found := _STATED_DEFAULT.search(text):
        text, stated = _STATED_DEFAULT.sub("", text), found[1] or found[2]
    if stated and value.strip("`$") != stated:
        value = _escape(stated)
    if action.required:
        value = "required"
    elif alternatives:
        value = f"required, unless {alternatives}"
    return value, _escape(text)


def _format_value(value: object) -> str:
    """Return a default value as code; "" for a flag, and for an empty or missing default."""
    if value is None or value is False or value in ("", [], argparse.SUPPRESS):
        return ""
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`"


def _escape(text: str) -> str:
    return _escape_bars(text.replace("\\", "\\\\"))


def _escape_bars(text: str) -> str:
    return text.replace("|", "\\|")

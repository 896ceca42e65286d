"""Text that the scripted engine generates for a prompt."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

THOUGHTS = "<think>\nI look at the notes.\n</think>\n\n"
"""Reasoning in tags, before each call and answer."""
Form = Literal["hermes", "qwen3_coder"]
"""Name of the tool call format, as in GATEWAY_TOOL_FORM."""
IDLE = "Nothing to do."
"""Answer to a prompt without any of the script's tools, such as a request for a title."""
_OFFERED = "within <tools></tools> XML tags:\n<tools>\n"
_RESULT = re.compile(r"<tool_response>\n(.*?)\n?</tool_response>", re.DOTALL)


@dataclass(frozen=True)
class Call:
    """A call of the first offered tool whose full name matches the regex `tool`."""

    tool: str
    arguments: dict[str, Any]
    """Arguments by name. Names that are not in the tool's schema are left out."""
    together: bool = False
    """True if the call is in the same turn as the previous call."""


@dataclass(frozen=True)
class Script:
    """Calls to make in order, and the answer after the last result.

    `{found}` in `answer` is replaced by the sorted matches of the regex `find` in the tools'
    results.
    """

    calls: Sequence[Call] = ()
    answer: str = "The notes say: {found}."
    find: str = r"word-[0-9a-f]{8}"
    form: Form = "hermes"

    def save(self, path: Path) -> None:
        """Replace the script file, which the engine reads for each prompt."""
        new = path.with_suffix(".new")
        new.write_text(json.dumps(asdict(self)), encoding="utf-8")
        new.replace(path)

    @classmethod
    def load(cls, path: Path) -> Script:
        fields = json.loads(path.read_text(encoding="utf-8"))
        calls = [Call(**call) for call in fields.pop("calls")]
        return cls(calls=calls, **fields)

    def write(self, prompt: str) -> str:
        """Return the assistant's text for a prompt that the demo model's chat template rendered."""
        results = _RESULT.findall(prompt)
        written: list[str] = []
        offered = offered_functions(prompt)
        for call in self.calls[len(results) :]:
            function = next((f for f in offered if re.fullmatch(call.tool, f["name"])), None)
            if function is None or (written and not call.together):
                break
            written.append(_tool_call(function, call.arguments, self.form))
        if written:
            return THOUGHTS + "\n".join(written)
        if not results and self.calls:
            return THOUGHTS + IDLE
        # Matches are sorted, since programs send the results of one turn in order of completion.
        found = sorted(set(re.findall(self.find, "\n".join(results))))
        return THOUGHTS + self.answer.replace("{found}", ", ".join(found))


def offered_functions(prompt: str) -> list[dict[str, Any]]:
    """Return the functions listed by the chat template, in order."""
    _, _, listed = prompt.partition(_OFFERED)
    lines = listed.partition("\n</tools>")[0].splitlines()
    tools = [json.loads(line) for line in lines if line]
    return [tool.get("function", tool) for tool in tools]


def _tool_call(function: dict[str, Any], arguments: dict[str, Any], form: Form) -> str:
    schema = function.get("parameters") or {}
    properties = schema.get("properties", {})
    filled = {name: value for name, value in arguments.items() if name in properties}
    for name in schema.get("required", ()):
        if name not in filled:
            filled[name] = example_of(properties.get(name, {}))
    if form == "qwen3_coder":
        parameters = "".join(
            f"<parameter={name}>\n{_raw(value)}\n</parameter>\n" for name, value in filled.items()
        )
        return f"<tool_call>\n<function={function['name']}>\n{parameters}</function>\n</tool_call>"
    call = json.dumps({"name": function["name"], "arguments": filled}, ensure_ascii=False)
    return f"<tool_call>\n{call}\n</tool_call>"


def _raw(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def example_of(schema: Any, definitions: Mapping[str, Any] | None = None) -> Any:
    """Return a small value that matches a JSON schema with common keywords.

    References are resolved in `definitions`, by default the schema's own.
    """
    if not isinstance(schema, dict):
        return "x"
    if definitions is None:
        definitions = schema.get("$defs", {})
    if "$ref" in schema:
        return example_of(definitions[schema["$ref"].rpartition("/")[2]], definitions)
    given = [schema[name] for name in ("const", "default") if name in schema]
    given += schema.get("enum") or []
    if given:
        return given[0]
    for name in ("anyOf", "oneOf", "allOf"):
        if schema.get(name):
            return example_of(schema[name][0], definitions)
    kind = schema.get("type", "object" if "properties" in schema else "string")
    properties, required = schema.get("properties", {}), schema.get("required", ())
    items = schema.get("items", {})
    examples = {
        "object": lambda: {
            each: example_of(properties.get(each), definitions) for each in required
        },
        "array": lambda: [example_of(items, definitions)] * schema.get("minItems", 0),
        "integer": lambda: max(1, schema.get("minimum", 1)),
        "number": lambda: max(1, schema.get("minimum", 1)),
        "boolean": lambda: False,
        "null": lambda: None,
    }
    return examples.get(kind[0] if isinstance(kind, list) else kind, lambda: "x")()

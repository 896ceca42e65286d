"""Which schemas are closed before they guide, and that what was valid stays possible."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.api.guides import closed

STRING = {"type": "string"}


def test_objects_that_name_properties_are_closed_wherever_they_stand() -> None:
    inner = {"type": "object", "properties": {"a": STRING}}
    schema = {
        "type": "object",
        "properties": {"x": inner, "many": {"type": "array", "items": inner}},
        "$defs": {"d": inner},
    }
    result = closed(schema)
    assert result["additionalProperties"] is False
    for place in (result["properties"]["x"], result["properties"]["many"]["items"]):
        assert place["additionalProperties"] is False
    assert result["$defs"]["d"]["additionalProperties"] is False


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "additionalProperties": True, "properties": {"a": STRING}},
        {"type": "object"},
        {"properties": {"a": STRING}, "required": ["b"]},
        {"allOf": [{"properties": {"a": STRING}}, {"properties": {"b": STRING}}]},
        {"$defs": {"p": {"properties": {"a": STRING}}}, "properties": {"x": {"allOf": []}}},
        {"properties": {"a": STRING}, "if": {}, "then": {"properties": {"b": STRING}}},
        {"enum": [{"properties": {"a": 1}}]},
        True,
        {"properties": {"a": STRING}, "required": None},
        {"properties": {"a": STRING}, "required": 5},
        {"properties": {"a": STRING}, "required": [[1]]},
        {"properties": {"a": STRING}, "required": ["a", None]},
    ],
)
def test_schemas_that_say_or_combine_more_stay_as_they_are(schema: Any) -> None:
    assert closed(schema) == schema


def test_a_property_called_properties_is_a_name() -> None:
    schema = {"type": "object", "properties": {"properties": {"type": "object"}}}
    assert closed(schema)["properties"] == {"properties": {"type": "object"}}

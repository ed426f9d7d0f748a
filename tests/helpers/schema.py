"""A JSON schema check as small as the schemas in tests/engines/schemas need: a keyword that it does not know is an error."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

KINDS: dict[str, tuple[type, ...]] = {
    "object": (dict,), "array": (list,), "string": (str,), "integer": (int,), "number": (int, float), "boolean": (bool,),
    "null": (type(None),),
}  # fmt: skip
KNOWN = {"$ref", "type", "items", "oneOf", "format", "additionalProperties", "properties", "enum", "required"}


def flaws(value: Any, schema: Mapping[str, Any], definitions: Mapping[str, Any], at: str = "") -> Iterator[str]:
    assert set(schema) <= KNOWN, set(schema) - KNOWN
    if "$ref" in schema:
        yield from flaws(value, definitions[schema["$ref"].rpartition("/")[2]], definitions, at)
        return
    kinds = schema.get("type", [])
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if kinds and not any(_is(value, kind) for kind in kinds):
        yield f"{at}: {value!r} is not of type {' or '.join(kinds)}"
        return
    if "enum" in schema and value not in schema["enum"]:
        yield f"{at}: {value!r} is none of {schema['enum']}"
    if "oneOf" in schema and sum(not list(flaws(value, one, definitions, at)) for one in schema["oneOf"]) != 1:
        yield f"{at}: {value!r} fits not one of its forms"
    if isinstance(value, dict):
        yield from _object(value, schema, definitions, at)
    if isinstance(value, list) and "items" in schema:
        for number, item in enumerate(value):
            yield from flaws(item, schema["items"], definitions, f"{at}[{number}]")


def _is(value: Any, kind: str) -> bool:
    return isinstance(value, KINDS[kind]) and (kind == "boolean" or not isinstance(value, bool))


def _object(value: Mapping[str, Any], schema: Mapping[str, Any], definitions: Mapping[str, Any], at: str) -> Iterator[str]:
    properties, more = schema.get("properties", {}), schema.get("additionalProperties", True)
    yield from (f"{at}: lacks {name}" for name in schema.get("required", []) if name not in value)
    for name, inner in value.items():
        if name in properties:
            yield from flaws(inner, properties[name], definitions, f"{at}.{name}")
        elif more is False:
            yield f"{at}: there is no field {name}"
        elif isinstance(more, dict):
            yield from flaws(inner, more, definitions, f"{at}.{name}")

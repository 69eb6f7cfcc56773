"""The schemas that the parts of the document share: one for each struct, and those that are added."""

import json
import re
from collections.abc import Iterable
from typing import Any

import msgspec

Schema = dict[str, Any]
REF = "#/components/schemas/"
# Python's end of a text, as JSON Schema's patterns (ECMA-262) write it.
_PYTHON_END, _END = r"\Z", "$"


class Components:
    """Schemas by name; `ref` gives a schema that refers to that of a type."""

    def __init__(self, types: Iterable[Any]):
        """`types`: all that `ref` and `struct` are asked for; a tuple is any of several.

        Their class names are unique, which `tests/unit/app/test_openapi.py` checks.
        """
        known = list(dict.fromkeys(one for given in types for one in _forms(given)))
        refs, found = msgspec.json.schema_components(known, ref_template=REF + "{name}")
        self.schemas: dict[str, Schema] = {
            name: {**_adapted(one), "title": name} for name, one in found.items()
        }
        self._refs = dict(zip(known, map(_adapted, refs), strict=True))

    def ref(self, type_: Any) -> Schema:
        """The schema of a type, or of any of several types."""
        schemas = [self._refs[one] for one in _forms(type_)]
        return schemas[0] if len(schemas) == 1 else {"anyOf": schemas}

    def add(self, name: str, schema: Schema) -> Schema:
        """Adds a schema; returns one that refers to it.

        Raises:
            ValueError: another schema has this name.
        """
        added = {"title": name, **schema}
        if self.schemas.setdefault(name, added) != added:
            raise ValueError(f"expected one schema with the name {name}, got two; rename one")
        return {"$ref": REF + name}

    def struct(self, type_: type[msgspec.Struct]) -> Schema:
        """The schema of a struct itself."""
        return self.schemas[self.ref(type_)["$ref"].removeprefix(REF)]

    def used_by(self, document: Any) -> dict[str, Schema]:
        """The schemas that a document refers to, and those that these refer to."""
        used: dict[str, Schema] = {}
        waiting = _names_in(document)
        while waiting:
            name = waiting.pop()
            if name not in used:
                used[name] = self.schemas[name]
                waiting |= _names_in(used[name])
        return dict(sorted(used.items()))


def _forms(type_: Any) -> tuple[Any, ...]:
    return type_ if isinstance(type_, tuple) else (type_,)


def _names_in(value: Any) -> set[str]:
    return set(re.findall(rf'"{REF}([^"]+)"', json.dumps(value)))


def _adapted(value: Any) -> Any:
    """A schema of msgspec's with JSON Schema's patterns."""
    if isinstance(value, dict):
        if "prefixItems" in value:
            value = _as_array(value)
        return {key: _adapted_entry(key, one) for key, one in value.items()}
    return [_adapted(one) for one in value] if isinstance(value, list) else value


def _as_array(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema of a tuple as that of an array of its length: many readers know no `prefixItems`."""
    kept = {key: one for key, one in schema.items() if key != "prefixItems"}
    kinds = [
        one for index, one in enumerate(schema["prefixItems"])
        if one not in schema["prefixItems"][:index]
    ]  # fmt: skip
    return kept | {"items": kinds[0] if len(kinds) == 1 else {"anyOf": kinds}}


def _adapted_entry(key: str, value: Any) -> Any:
    if key == "pattern":
        return value.replace(_PYTHON_END, _END)
    return _adapted(value)

"""JSON Schemas of bodies that are put together: of fields of several structs, and of unused ones.

msgspec makes those of a struct. Decoders that take fields of several structs in one object, read null
as left out, or know fields without effect, make their own with these functions.
"""

import json
from collections.abc import Collection, Mapping

import msgspec

from app.route.components import Components, Schema
from app.route.unused_fields import Unused

NULL = {"type": "null"}


def object_of(about: str, fields: Mapping[str, Schema], required: Collection[str] = ()) -> Schema:
    """An object with these fields and no others; `about` is its description."""
    return {
        "description": about,
        "type": "object",
        "properties": dict(sorted(fields.items())),
        "required": sorted(required),
        "additionalProperties": False,
    }


def fields_of(
    components: Components, struct: type[msgspec.Struct], *, without: Collection[str] = ()
) -> dict[str, Schema]:
    """The schemas of a struct's fields, by name."""
    properties = components.struct(struct)["properties"]
    return {name: one for name, one in properties.items() if name not in without}


def required_of(components: Components, struct: type[msgspec.Struct]) -> list[str]:
    """The names of the fields that a struct needs."""
    return list(components.struct(struct)["required"])


def nullable(fields: Mapping[str, Schema], *, but: Collection[str] = ()) -> dict[str, Schema]:
    """Fields where null means left out."""
    return {name: one if name in but else or_null(one) for name, one in fields.items()}


def or_null(schema: Schema) -> Schema:
    """A schema that null fits, too."""
    inner = without_default(schema)
    options = inner.get("anyOf", [inner])
    if NULL in options or "null" in inner.get("type", ()):
        return schema
    # An empty object is what null stands for here, and generators of clients refuse it as a default.
    default = schema.get("default", {})
    return {"anyOf": [*options, NULL], **({} if default == {} else {"default": default})}


def without_default(schema: Schema) -> Schema:
    """A field's schema as that of the entries of a list."""
    return {key: one for key, one in schema.items() if key != "default"}


def unused_fields(table: Mapping[str, Unused]) -> dict[str, Schema]:
    """Fields that are accepted with values that ask for nothing; null alone is not worth a field."""
    fields = {}
    for name, one in table.items():
        if one.accepted is None:
            fields[name] = {"description": f"Without effect: {one.reason}."}
        elif one.accepted:
            values = ", ".join(f"`{json.dumps(value)}`" for value in one.accepted)
            fields[name] = {"description": f"Only {values} or null: {one.reason}."}
    return fields

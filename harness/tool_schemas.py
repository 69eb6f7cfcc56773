"""JSON schemas as public tool definitions and response formats have them."""

STRING = {"type": "string"}
ADDRESS = {
    "type": "object",
    "properties": {
        "street": {"type": "string", "minLength": 1, "maxLength": 200}, "city": STRING,
        "postal_code": {"type": "string", "pattern": "^[0-9]{5}(-[0-9]{4})?$"},
        "country": {"type": "string", "enum": ["DE", "FR", "GB", "JP", "US"]},
    },
    "required": ["street", "city"], "additionalProperties": False,
}  # fmt: skip

TOOL_SCHEMAS = {
    "weather": {
        "type": "object",
        "properties": {
            "location": {"type": "string", "description": "City and state, e.g. Boston, MA"},
            "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
        },
        "required": ["location"],
    },
    "search": {
        "type": "object",
        "properties": {
            "query": STRING, "num_results": {"type": "integer", "minimum": 1, "maximum": 50},
            "domains": {"type": "array", "items": STRING, "maxItems": 100},
            "recency_days": {"type": ["integer", "null"]},
        },
        "required": ["query"], "additionalProperties": False,
    },
    "calendar": {
        "type": "object",
        "properties": {
            "title": {"type": "string", "maxLength": 120},
            "start": {"type": "string", "format": "date-time"}, "end": {"type": "string", "format": "date-time"},
            "attendees": {"type": "array", "minItems": 1, "maxItems": 30, "items": {"type": "string", "format": "email"}},
            "is_private": {"type": "boolean"},
        },
        "required": ["title", "start", "end"],
    },
    "sql": {
        "type": "object",
        "properties": {"query": STRING, "timeout_s": {"type": "number"}, "database": {"enum": ["users", "orders"]}},
        "required": ["query"],
    },
    "order": {
        "type": "object",
        "properties": {
            "shipping": {"$ref": "#/$defs/address"}, "billing": {"$ref": "#/$defs/address"},
            "items": {
                "type": "array", "minItems": 1, "maxItems": 100,
                "items": {
                    "type": "object",
                    "properties": {"sku": {"type": "string", "pattern": "^[A-Z]{3}-[0-9]{1,6}$"}, "quantity": {"type": "integer"}},
                    "required": ["sku", "quantity"],
                },
            },
        },
        "required": ["shipping", "items"], "$defs": {"address": ADDRESS},
    },
    "tree": {
        "type": "object",
        "properties": {"name": STRING, "children": {"type": "array", "items": {"$ref": "#"}}},
        "required": ["name", "children"],
    },
    "math": {
        "type": "object",
        "properties": {
            "steps": {
                "type": "array",
                "items": {"type": "object", "properties": {"explanation": STRING, "output": STRING}, "required": ["explanation", "output"]},
            },
            "final_answer": STRING,
        },
        "required": ["steps", "final_answer"], "additionalProperties": False,
    },
    "choice": {"anyOf": [{"type": "object", "properties": {"kind": {"const": kind}, "id": {"type": "string"}}, "required": ["kind"]} for kind in ("a", "b", "c")]},
    "labels": {"type": "array", "items": {"type": "string", "enum": [f"label-{number}" for number in range(200)]}, "maxItems": 100},
    "file_edit": {
        "type": "object",
        "properties": {
            "path": {"type": "string", "pattern": "^(/[A-Za-z0-9_.-]+)+$"},
            "edits": {"type": "array", "items": {"type": "object", "properties": {"old": STRING, "new": STRING}, "required": ["old", "new"]}},
        },
        "required": ["path", "edits"],
    },
    "contact": {
        "type": "object",
        "properties": {"phone": {"type": "string", "pattern": r"^\+?[0-9]{1,3}[ -]?([0-9]{2,4}[ -]?){2,4}$"}, "email": {"type": "string", "format": "email"}, "address": ADDRESS},
    },
    "wide": {"type": "object", "properties": {f"field_{number}": {"type": "number"} for number in range(60)}},
}  # fmt: skip

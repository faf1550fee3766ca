"""Every keyword of JSON schema, and values that no schema should have: for checks, and for requests."""

from __future__ import annotations

from typing import Any, Final

KEYWORDS: Final = (
    *("$schema", "$id", "$ref", "$anchor", "$defs", "$comment", "$vocabulary"),
    *("$dynamicRef", "$dynamicAnchor", "$recursiveRef", "$recursiveAnchor", "id", "definitions"),
    *("type", "enum", "const", "format", "title", "description", "default", "examples"),
    *("deprecated", "readOnly", "writeOnly", "nullable", "x-guidance", "x-other"),
    *("allOf", "anyOf", "oneOf", "not", "if", "then", "else"),
    *("dependentSchemas", "dependentRequired", "dependencies", "propertyNames"),
    *("properties", "patternProperties", "additionalProperties", "unevaluatedProperties"),
    *("required", "minProperties", "maxProperties"),
    *("prefixItems", "items", "additionalItems", "unevaluatedItems", "contains"),
    *("minContains", "maxContains", "minItems", "maxItems", "uniqueItems"),
    *("minLength", "maxLength", "pattern", "contentEncoding", "contentMediaType", "contentSchema"),
    *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
)
NASTY_VALUES: Final[list[Any]] = [
    *(None, True, False, [], {}, "", "x", [[]], [{}], [None], [True], {"a": {}}, {"a": 5}),
    *(0, -1, 1, 1.5, -0.0, 5e-324, 1e308, -1e308, 2**31, 2**32, 2**53, 2**63, 2**64, 2**70),
    *(10**308, 10**309, 10**400, -(10**400), 10**4000, [10**400], {"a": 10**400}),
    *("#", "#/", "#/a", "#/anyOf/0", "#/anyOf/" + "9" * 5000, "#/%", "#/%zz", "#/~", "#/~2"),
    *("#/properties/\u0660", "#/one%4Ff/0", "http://x/", "#anchor", "\0", "\u202e", "x" * 5000),
    *("[", "(", ")", "{", "a{3", "a{" + "9" * 5000 + "}", "\\", "(?=a)", "[" * 500, "\\p{", "*"),
    *(["string", []], ["string", {}], ["a", "a"], [1, "1"], "string", "object", ["null", "null"]),
    *([{"$ref": "#"}], {"$ref": "#"}, {"$ref": []}, {"[": {}}, {"a": []}, {"a": None}, [5], [[5]]),
    *([{"type": "object", "required": 5}], [{"type": "object", "properties": []}], [{"type": {}}]),
    *([{"const": {}}, {"const": []}], [{"enum": [{}, []]}], {"required": [[]]}, [{"oneOf": 5}]),
]

"""What a revision says for what a request leaves open, from the API's JSON to the one form that is stored.

Ranges and names are the data plane's own (gateway/revision_params.py): what is taken here it can use.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec

from loraplex_platform.errors import InvalidRequestError
from loraplex_platform.gateway.field_errors import field_error
from loraplex_platform.gateway.revision_params import RevisionParams


def canonical_params(params: dict[str, Any]) -> dict[str, Any]:
    """The same without what is at its default, so that equal params are equal JSON.

    Raises:
        InvalidRequestError: names the field, however deep it is.
    """
    try:
        text = json.dumps(params, ensure_ascii=False, allow_nan=False)
        text.encode()
    except ValueError:
        raise InvalidRequestError(
            "params: it holds a number or a character that is none.", param="params"
        ) from None
    if "\\u0000" in text:
        raise InvalidRequestError("params: it must not hold NUL characters.", param="params")
    try:
        read = msgspec.convert(params, RevisionParams)
    except msgspec.ValidationError as error:
        found = field_error(str(error), RevisionParams)
        raise InvalidRequestError(
            f"params: {found.message}",
            param="params" if found.param is None else f"params.{found.param}",
        ) from None
    stored: dict[str, Any] = {}
    if read.system_prompt is not None:
        stored["system_prompt"] = read.system_prompt
    sampling = {
        name: value
        for name, value in msgspec.to_builtins(read.sampling).items()
        if value is not None
    }
    if sampling:
        stored["sampling"] = sampling
    return stored


def schema_of(kind: type[msgspec.Struct]) -> dict[str, Any]:
    """Its JSON schema in one piece, for OpenAPI's page."""
    [schema], parts = msgspec.json.schema_components([kind], ref_template="{name}")

    def inlined(value: Any) -> Any:  # noqa: ANN401 (any JSON)
        if isinstance(value, dict):
            if "$ref" in value:
                return inlined(parts[value["$ref"]])
            return {name: inlined(item) for name, item in value.items() if name != "title"}
        return [inlined(item) for item in value] if isinstance(value, list) else value

    found: dict[str, Any] = inlined(schema)
    return found

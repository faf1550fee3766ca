"""The request's side of tools and structured output: OpenAI's shapes, and vLLM's `structured_outputs`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

MAX_TOOLS = 128
MAX_TOOL_CALLS = 128
MAX_CHOICES_LISTED = 1024

_FunctionName = Annotated[str, Meta(pattern=r"\A[a-zA-Z0-9_-]{1,64}\Z")]
_FormatName = Annotated[str, Meta(pattern=r"\A[a-zA-Z0-9_-]{1,64}\Z")]


CallId = Annotated[str, Meta(max_length=256)]


class JsonSchemaFormat(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`strict` changes nothing: a schema is always followed, or refused with the path of what is in the way.

    `oneOf` is followed where its schemas exclude each other by type, constants or a required property.
    """

    name: _FormatName
    description: str | None = None
    schema: dict[str, Any] | bool | None = None
    strict: bool | None = None


class ResponseFormat(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the answer's text must be."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Exactly one of them, as in vLLM. `grammar` is in llguidance's dialect of Lark."""

    json: dict[str, Any] | bool | str | None = None
    json_object: bool | None = None
    regex: Annotated[str, Meta(min_length=1)] | None = None
    choice: Annotated[list[str], Meta(min_length=1, max_length=MAX_CHOICES_LISTED)] | None = None
    grammar: Annotated[str, Meta(min_length=1)] | None = None


class FunctionDefinition(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A function that the model may call, in whatever format the model writes calls.

    `strict`: its arguments always follow `parameters`, also where the model is free to call or not.
    """

    name: _FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Only functions."""

    type: Literal["function"]
    function: FunctionDefinition


class NamedFunction(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """By name."""

    name: str


class NamedToolChoice(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """This one must be called; a grammar sees to it."""

    type: Literal["function"]
    function: NamedFunction


ToolChoice = Literal["none", "auto", "required"] | NamedToolChoice


class CalledFunction(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the model called, as we said it. `arguments`: JSON, as the model wrote it."""

    name: Annotated[str, Meta(min_length=1, max_length=256)]
    arguments: str = ""


class CalledTool(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A call in an assistant message that a client sends back. `index` is of streams; ignored."""

    id: CallId
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None

"""Tools of a chat request: what the model is told, what it is held to, how its text is read.

| `tool_choice` | the model is shown the tools | its text |
|---|---|---|
| none, or no tools | no | free |
| auto | yes | free, and read for calls; if a tool is `strict`, what follows a call's mark is held to it |
| required | yes | calls, and nothing else, by a grammar |
| a function | that one | one call of it, by a grammar |

With `response_format` and auto, the text is calls or the format. Arguments follow `parameters` whenever a
grammar is there; a tool that is not `strict` may use keywords of JSON schema that no grammar follows,
which are then ignored, as in OpenAI's API.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Final

from loraplex_engine.protocol import MAX_GRAMMAR_CHARS, Grammar

from loraplex_platform.gateway.errors import InvalidValueError
from loraplex_platform.gateway.response_format import schema_text
from loraplex_platform.gateway.schema_check import check_schema, followable
from loraplex_platform.gateway.structured_schemas import (
    FunctionDefinition,
    NamedToolChoice,
    Tool,
    ToolChoice,
)
from loraplex_platform.gateway.tool_formats.call_parser import CallParser
from loraplex_platform.gateway.tool_formats.tool_format import Holding, ToolFormat, quoted

_NO_PARAMETERS: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {},
    "additionalProperties": False,
}
_JSON_OBJECT: Final = '{"type":"object"}'


@dataclass(frozen=True, slots=True)
class ToolPlan:
    """What a request's tools come to."""

    format: ToolFormat
    shown: list[dict[str, Any]]  # as the chat template takes them
    names: frozenset[str]
    grammar: Grammar | None
    ends_after_call: bool  # the answer is over with its first call; a grammar may see to that
    is_marked: bool = False  # an object may be the answer itself: only a mark makes it a call

    def parser(self) -> CallParser:
        """For one choice's text."""
        return self.format.parser(self.names, is_marked=self.is_marked)


def plan_tools(
    tools: list[Tool] | None,
    choice: ToolChoice | None,
    is_parallel: bool | None,
    output: Grammar | None,
    tool_format: ToolFormat,
) -> ToolPlan | None:
    """Check tools and choice; None: an ordinary answer, of which `output` is the grammar.

    Args:
        tool_format: how the model writes calls.

    Raises:
        InvalidRequestError: names the field and what is wrong with it.
    """
    if not tools:
        _refuse_choice_without_tools(choice)
        return None
    _check_tools(tools)
    offered = tools
    if isinstance(choice, NamedToolChoice):
        offered = [tool for tool in tools if tool.function.name == choice.function.name]
        if not offered:
            raise InvalidValueError(
                "'tool_choice.function.name' is none of the tools.",
                param="tool_choice.function.name",
            )
    if choice == "none":
        return None
    is_forced = choice not in (None, "auto")
    is_single = isinstance(choice, NamedToolChoice) or is_parallel is False
    if output is not None and output.kind not in ("json_object", "json_schema"):
        raise InvalidValueError(
            "'structured_outputs' with a text format cannot be combined with 'tools'.",
            param="structured_outputs",
        )
    grammar = None
    otherwise = None if is_forced else output
    if is_forced or output is not None or any(tool.function.strict for tool in offered):
        grammar = _calls_grammar(
            [tool.function for tool in offered],
            tool_format,
            "calls" if is_forced else "text" if otherwise is None else "calls_or_other",
            is_single=is_single,
            otherwise=otherwise,
        )
    return ToolPlan(
        format=tool_format,
        shown=[_shown(tool.function) for tool in offered],
        names=frozenset(tool.function.name for tool in offered),
        grammar=grammar,
        # A call's end is the answer's: nothing is generated behind it to be thrown away.
        ends_after_call=is_single and not is_forced,
        is_marked=otherwise is not None,
    )


def _refuse_choice_without_tools(choice: ToolChoice | None) -> None:
    if choice not in (None, "none", "auto"):
        raise InvalidValueError("'tool_choice' needs 'tools'.", param="tool_choice")


def _check_tools(tools: list[Tool]) -> None:
    names: set[str] = set()
    for index, tool in enumerate(tools):
        function = tool.function
        if function.name in names:
            raise InvalidValueError(
                f"'tools[{index}].function.name' is the name of another tool too.",
                param=f"tools[{index}].function.name",
            )
        names.add(function.name)
        if function.parameters is not None:
            path = f"tools[{index}].function.parameters"
            check_schema(function.parameters, path, is_strict=bool(function.strict))
            if function.parameters.get("type", "object") != "object":
                raise InvalidValueError(f"'{path}.type' must be 'object'.", param=f"{path}.type")


def _shown(function: FunctionDefinition) -> dict[str, Any]:
    shown: dict[str, Any] = {"name": function.name}
    if function.description is not None:
        shown["description"] = function.description
    if function.parameters is not None:
        shown["parameters"] = function.parameters
    return {"type": "function", "function": shown}


def _calls_grammar(
    functions: list[FunctionDefinition],
    tool_format: ToolFormat,
    holding: Holding,
    *,
    is_single: bool,
    otherwise: Grammar | None,
) -> Grammar:
    """Calls, or what `holding` lets stand beside them."""
    lines = tool_format.rules(holding, is_single=is_single)
    lines.append("body: " + " | ".join(f"call_{index}" for index in range(len(functions))))
    for index, function in enumerate(functions):
        head = quoted(tool_format.head(function.name))
        lines.append(f"call_{index}: {head} arguments_{index} {quoted('}')}")
        lines.append(f"arguments_{index}: %json {_arguments_schema(index, function)}")
    if otherwise is not None:
        schema = otherwise.value if otherwise.kind == "json_schema" else _JSON_OBJECT
        lines.append(f"otherwise: %json {_with_options(json.loads(schema), is_lenient=False)}")
    value = "\n".join(lines) + "\n"
    if len(value) > MAX_GRAMMAR_CHARS:
        raise InvalidValueError("'tools' are too large to be followed by a grammar.", param="tools")
    return Grammar(kind="lark", value=value)


def _arguments_schema(index: int, function: FunctionDefinition) -> str:
    schema = function.parameters or _NO_PARAMETERS
    schema_text(schema, f"tools[{index}].function.parameters")
    schema = followable(schema, is_strict=bool(function.strict))
    if "type" not in schema:
        schema = {"type": "object", **schema}
    return _with_options(schema, is_lenient=not function.strict)


def _with_options(schema: Any, *, is_lenient: bool) -> str:  # noqa: ANN401 - JSON
    """The schema with the same options as the engine gives to a schema that stands alone.

    `is_lenient`: what no grammar follows is ignored, and `oneOf` taken for `anyOf`.
    """
    options = {"whitespace_pattern": " ", "lenient": is_lenient, "coerce_one_of": is_lenient}
    if isinstance(schema, bool):
        schema = {} if schema else {"enum": []}
    return json.dumps({**schema, "x-guidance": options}, ensure_ascii=False)

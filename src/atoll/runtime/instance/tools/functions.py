"""The functions a request offers, and whether one must be called."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from atoll.runtime.openai import ApiError

MAX_FUNCTIONS = 128
MAX_DEPTH = 48
"""How deep a schema may be nested: what reads it calls itself for every level."""
MAX_SCHEMA_CHARS = 2**16
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_NOTES = frozenset(
    {"description", "title", "examples", "default", "$comment", "deprecated", "x-guidance"}
)
"""Keywords of a schema for people; they say nothing of what is valid."""
_NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
_PLAIN = frozenset({"enum", "const", "required", "dependentRequired"})

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class CallableFunction:
    """A function the model may call."""

    name: str
    schema: Json
    """JSON schema of its arguments, an object."""
    strict: bool = False
    """Whether every keyword of the schema has to hold; else those that cannot be checked are left out."""


@dataclass(frozen=True, slots=True)
class ToolUse:
    """Functions that a request may call.

    `offered` are the tools as the client describes them, for the prompt; `callable` are those that
    `tool_choice` leaves. With `required` there is no answer without a call.
    """

    offered: tuple[Json, ...]
    callable: tuple[CallableFunction, ...]
    required: bool = False
    parallel: bool = True
    """Whether an answer may hold several calls."""


def read_tools(
    tools: Sequence[Json] | None, choice: str | Json | None, parallel: bool | None
) -> ToolUse | None:
    """Return what a request may call, None if nothing; what is wrong is an ApiError."""
    functions = [_function(tool, f"tools[{i}]") for i, tool in enumerate(_bounded(tools or ()))]
    names = [function.name for function in functions]
    for number, name in enumerate(names):
        if name in names[:number]:
            raise ApiError(
                400, f"two functions are named {name}", param=f"tools[{number}].function.name"
            )
    if choice in (None, "auto", "required", "none") and (functions or choice in (None, "none")):
        if not functions or choice == "none":
            return None
        return ToolUse(
            offered=tuple(tools or ()),
            callable=tuple(functions),
            required=choice == "required",
            parallel=parallel is not False,
        )
    if not functions:
        raise ApiError(400, "there are no tools to choose from", param="tool_choice")
    name = _chosen(choice)
    if name not in names:
        raise ApiError(
            400, f"there is no function {name[:64]!r} among the tools", param="tool_choice"
        )
    chosen = functions[names.index(name)]
    # To name a function is to ask for one call of it.
    return ToolUse(tuple(tools or ()), (chosen,), required=True, parallel=False)


def read_functions(functions: Sequence[Json] | None, choice: str | Json | None) -> ToolUse | None:
    """Return what may be called by a request in the words that OpenAI had before tools."""
    tools = [{"type": "function", "function": function} for function in functions or ()]
    if isinstance(choice, dict):
        return read_tools(tools, {"type": "function", "function": choice}, parallel=False)
    if choice not in (None, "auto", "none") or (choice == "auto" and not tools):
        message = 'function_call is "auto", "none" or {"name": ...} beside functions'
        raise ApiError(400, message, param="function_call")
    return read_tools(tools, choice, parallel=False)


def _bounded(tools: Sequence[Json]) -> Sequence[Json]:
    if len(tools) > MAX_FUNCTIONS:
        raise ApiError(400, f"at most {MAX_FUNCTIONS} tools a request", param="tools")
    return tools


def _chosen(choice: str | Json | None) -> str:
    function = choice.get("function") if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if isinstance(choice, dict) and choice.get("type") == "function" and isinstance(name, str):
        return name
    raise ApiError(
        400,
        'tool_choice is "auto", "none", "required" or '
        '{"type": "function", "function": {"name": ...}}',
        param="tool_choice",
    )


def _function(tool: Json, where: str) -> CallableFunction:
    if tool.get("type", "function") != "function":
        raise ApiError(400, "only functions can be called", param=f"{where}.type")
    function = tool.get("function")
    if not isinstance(function, dict):
        raise ApiError(400, "a tool is described in its field function", param=f"{where}.function")
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ApiError(
            400,
            "a name is 1 to 64 letters, digits, _ and -",
            param=f"{where}.function.name",
        )
    if not isinstance(function.get("description", ""), str | None):
        raise ApiError(400, "a description is a text", param=f"{where}.function.description")
    strict = function.get("strict")
    if strict is not None and not isinstance(strict, bool):
        raise ApiError(400, "strict is true or false", param=f"{where}.function.strict")
    schema = _schema(function.get("parameters"), f"{where}.function.parameters")
    return CallableFunction(name, schema, bool(strict))


def _schema(parameters: object, where: str) -> Json:
    """Return the schema of a function's arguments; without one, a function takes none."""
    if parameters is None:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    if not isinstance(parameters, dict):
        raise ApiError(400, "parameters are a JSON schema", param=where)
    if too_deep(parameters):
        raise ApiError(400, f"a schema has at most {MAX_DEPTH} levels", param=where)
    if len(json.dumps(parameters)) > MAX_SCHEMA_CHARS:
        raise ApiError(400, f"a schema has at most {MAX_SCHEMA_CHARS} characters", param=where)
    if parameters.get("type", "object") != "object":
        raise ApiError(400, "arguments are an object", param=f"{where}.type")
    schema: Json = {"type": "object"} | bare_schema(parameters)
    if schema.get("properties") and not schema.keys() & _OPEN:
        # What a function does not know would only make its call fail.
        schema["additionalProperties"] = False
    return schema


_OPEN = frozenset(
    {"additionalProperties", "patternProperties", "unevaluatedProperties", "propertyNames"}
    | {"$ref", "anyOf", "oneOf", "allOf", "if"}
)


def too_deep(value: object, most: int = MAX_DEPTH) -> bool:
    """Return whether objects and lists are nested deeper than `most` levels."""
    level = [value]
    for _ in range(most + 1):
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
        if not level:
            return False
    return True


def bare_schema(schema: Any) -> Any:
    """Return a schema without what only people read."""
    if isinstance(schema, list):
        return [bare_schema(part) for part in schema]
    if not isinstance(schema, Mapping):
        return schema
    bare: Json = {}
    for key, value in schema.items():
        if key in _NAMED and isinstance(value, Mapping):
            bare[key] = {name: bare_schema(part) for name, part in value.items()}
        elif key in _PLAIN:
            bare[key] = value
        elif key not in _NOTES:
            bare[key] = bare_schema(value)
    return bare

"""Forms that an answer is asked to have: OpenAI's field, and those of vLLM and llama.cpp, as one guide."""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

from atoll.core.request_parameters import InstanceParameters, OutputFormat
from atoll.engine.engine_errors import EngineError
from atoll.engine.guidance import MatcherFactory, check_guide
from atoll.engine.text import TextCodec
from atoll.runtime.instance.tools.call_formats import CallFormat
from atoll.runtime.instance.tools.functions import MAX_DEPTH, ToolUse, too_deep
from atoll.runtime.openai import ApiError

_MAX_GUIDE_CHARS = 2**16
"""Of a schema or regular expression: reading one takes the square of its length, and a node's time."""
_MAX_GRAMMAR_CHARS = 2**17
"""Of all functions together, without what only people read."""
_STRUCTURED = ("json", "regex", "choice", "grammar", "json_object")
"""Fields of `structured_outputs` of which one is given."""


class AskedForm(NamedTuple):
    """A guide, and the field that asks for it."""

    guide: OutputFormat
    param: str


def read_form(fields: InstanceParameters, response_format: dict[str, Any]) -> AskedForm | None:
    """Return the form that is asked for, None: any; two of them, or one that is none, are an ApiError."""
    given = [
        AskedForm(_schema(fields.guided_json, "guided_json"), "guided_json")
        if fields.guided_json is not None
        else None,
        AskedForm(_schema(fields.json_schema, "json_schema"), "json_schema")
        if fields.json_schema is not None
        else None,
        _text("regex", fields.guided_regex, "guided_regex"),
        AskedForm(_choice(fields.guided_choice, "guided_choice"), "guided_choice")
        if fields.guided_choice is not None
        else None,
        _text("grammar", fields.guided_grammar, "guided_grammar"),
        _text("grammar", fields.grammar, "grammar"),
        _structured(fields.structured_outputs),
        _openai(response_format),
    ]
    forms = [form for form in given if form is not None]
    if len(forms) > 1:
        message = f"an answer has one form, and {forms[0].param} asks for another"
        raise ApiError(400, message, param=forms[1].param)
    if forms and len(forms[0].guide.text) > _MAX_GUIDE_CHARS:
        message = f"a guide has at most {_MAX_GUIDE_CHARS} characters"
        raise ApiError(400, message, param=forms[0].param)
    return forms[0] if forms else None


def guide_calls(asked: AskedForm | None, use: ToolUse, form: CallFormat) -> AskedForm:
    """Return the grammar of an answer that may call; what is no call has the form that was asked for."""
    schema: str | None = None
    # Where a call is required there is no other content that could have a form.
    if asked is not None and not use.required:
        if asked.guide.kind not in ("json_schema", "json_object") or not form.begins_apart:
            raise ApiError(400, "this form cannot be asked for beside tools", param=asked.param)
        schema = asked.guide.text or '{"type": "object"}'
    text = form.grammar(use, schema)
    if len(text) > _MAX_GRAMMAR_CHARS:
        raise ApiError(
            400,
            f"the schemas of all tools have at most {_MAX_GRAMMAR_CHARS} characters together",
            param="tools",
        )
    return AskedForm(OutputFormat(kind="lark", text=text), "tools")


def check_form(asked: AskedForm, codec: TextCodec, generated: tuple[int, ...] = ()) -> None:
    """Refuse a guide that no answer can follow, or none that begins so, before a node has to."""
    try:
        matchers = MatcherFactory(codec.folder, codec.vocabulary, codec.eos)
        check_guide(matchers, asked.guide, generated)
    except EngineError as error:
        param = "atoll.resume" if generated else asked.param
        raise ApiError(400, str(error), param=param) from error


def _openai(form: dict[str, Any]) -> AskedForm | None:
    param = "response_format"
    kind = form.get("type", "text")
    if kind == "text":
        return None
    if kind == "json_object":
        # llama.cpp takes a schema here as well.
        schema = form.get("schema")
        return AskedForm(
            OutputFormat(kind="json_object") if schema is None else _schema(schema, param), param
        )
    if kind == "json_schema":
        schema = (form.get("json_schema") or {}).get("schema")
        return AskedForm(_schema(schema, "response_format.json_schema.schema"), param)
    raise ApiError(400, f"unknown form {str(kind)[:40]!r}", param="response_format.type")


def _structured(given: dict[str, Any] | None) -> AskedForm | None:
    if given is None:
        return None
    param = "structured_outputs"
    named = [name for name in _STRUCTURED if given.get(name) not in (None, False)]
    if len(named) != 1:
        message = f"one of {', '.join(_STRUCTURED)} is given, these are {len(named)}"
        raise ApiError(400, message, param=param)
    # How a form is written changes the answer, too.
    others = [key for key, value in given.items() if key not in (*named, *_STRUCTURED) and value]
    if others:
        message = f"structured_outputs does not know {others[0][:40]!r} here"
        raise ApiError(400, message, param=param)
    (name,) = named
    value, param = given[name], f"{param}.{name}"
    if name == "json":
        return AskedForm(_schema(value, param), param)
    if name == "json_object":
        return AskedForm(OutputFormat(kind="json_object"), param)
    if name == "choice":
        return AskedForm(_choice(value, param), param)
    if not isinstance(value, str):
        raise ApiError(400, f"{name} is a text", param=param)
    return _text("regex" if name == "regex" else "grammar", value, param)


def _text(kind: str, text: str | None, param: str) -> AskedForm | None:
    return AskedForm(OutputFormat.parse({"kind": kind, "text": text}), param) if text else None


def _schema(schema: Any, param: str) -> OutputFormat:
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError):
            raise ApiError(400, "the schema is not JSON", param=param) from None
    if not isinstance(schema, dict):
        raise ApiError(400, "there is no schema", param=param)
    if too_deep(schema):
        raise ApiError(400, f"a schema has at most {MAX_DEPTH} levels", param=param)
    return OutputFormat(kind="json_schema", text=json.dumps(schema))


def _choice(texts: Any, param: str) -> OutputFormat:
    if not isinstance(texts, list) or not texts or not all(isinstance(t, str) for t in texts):
        raise ApiError(400, "a choice is a list of texts", param=param)
    return OutputFormat(kind="regex", text="|".join(f"(?:{re.escape(text)})" for text in texts))

"""The gateway's description of itself. Requests are described by the types that check them."""

from __future__ import annotations

from functools import cache
from typing import Any

import msgspec

from atoll.runtime.gateway.console.console import TABLE
from atoll.runtime.gateway.dialects import DIALECTS
from atoll.runtime.http.openapi import FAILURES, REF, Json, describe_failures, make_document
from atoll.runtime.openai import (
    DETOKENIZE,
    EMBEDDINGS,
    FORMS,
    IMAGES,
    REQUESTS,
    SPEECH,
    TOKENIZE,
    TRANSCRIPTIONS,
)

_MESSAGES_ERROR = {
    "type": "object",
    "required": ["type", "error"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
        },
        "request_id": {"type": "string"},
    },
}
_SUMMARIES = {
    "/v1/chat/completions": "Answer a conversation",
    "/v1/completions": "Complete a text",
    EMBEDDINGS: "Turn texts into vectors",
    TRANSCRIPTIONS: "Write down what is said in a recording",
    SPEECH: "Speak a text",
    IMAGES: "Draw pictures",
    "/v1/responses": "Answer a conversation of items; nothing is stored",
    "/v1/messages": "Answer a conversation, in Anthropic's way",
    "/v1/messages/count_tokens": "Count the tokens of a conversation, in Anthropic's way",
    TOKENIZE: "Turn a text or a conversation into tokens",
    DETOKENIZE: "Turn tokens into text",
}
_BYTES = {"schema": {"type": "string", "format": "binary"}}
_ANSWERS: dict[str, dict[str, Any]] = {
    EMBEDDINGS: {},
    TRANSCRIPTIONS: {"text/plain": {"schema": {"type": "string"}}},
    SPEECH: {"audio/*": _BYTES, "application/octet-stream": _BYTES},
    IMAGES: {},
}
"""Types of answers besides JSON; elsewhere, and where sound is asked for as events, streams of events."""
_EVENTS = {"text/event-stream": {"schema": {"type": "string"}}}
_WHOLE = frozenset({EMBEDDINGS, TOKENIZE, DETOKENIZE, "/v1/messages/count_tokens"})
"""Where answers are never streams of events."""
_FAILURES = {status: FAILURES[status] for status in ("408", "413", "431")} | {
    "400": "the request is malformed",
    "401": "a valid key is needed",
    "403": "the key may not use this model, or no node that serves it",
    "404": "there is no such model",
    "422": "backends stopped working while they read the request",
    "429": "every backend refuses more requests",
    "502": "every attempt failed",
    "503": "full, or no backend is up",
    "504": "no backend answered in time",
}
_DIALECTS = {dialect.path: dialect.request for dialect in DIALECTS.values()}
_ERRORS = dict.fromkeys(("/v1/messages", "/v1/messages/count_tokens"), "MessagesError")
"""Shapes of errors where they are not OpenAI's."""


@cache
def document() -> Json:
    """Return the OpenAPI document of a gateway."""
    paths, schemas = describe_models()
    return make_document("Atoll gateway", {"gateway": TABLE}, paths=paths, schemas=schemas)


def describe_models() -> tuple[Json, Json]:
    """Return the paths that need no role, those of models above all, and the schemas that they name."""
    _, schemas = msgspec.json.schema_components(
        (*REQUESTS.values(), *FORMS.values(), *_DIALECTS.values()), ref_template=REF
    )
    schemas["MessagesError"] = _MESSAGES_ERROR
    for kind in FORMS.values():
        # The file passes unread, so no type has it.
        form = schemas[kind.__name__]
        form["properties"]["file"] = _BYTES["schema"]
        form["required"] = [*form["required"], "file"]
        del form["properties"]["models"]
    paths: Json = {path: {"post": _post(path)} for path in (*REQUESTS, *FORMS, *_DIALECTS)}
    paths["/v1/models"] = {"get": _get("List the models", "application/json")}
    paths["/v1/models/{model}"] = {
        "get": _get("Describe a model", "application/json", "404")
        | {
            "parameters": [
                {"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}
            ]
        }
    }
    paths["/health"] = {"get": _get("Whether the gateway serves", "application/json", "503")}
    paths["/ping"] = {"get": _get("Whether the gateway serves", "application/json", "503")}
    paths["/version"] = {"get": _get("The version of Atoll", "application/json")}
    paths["/load"] = {"get": _get("How many requests run", "application/json", "401")}
    paths["/tokenizer_info"] = {
        "get": _get("The settings of a model's tokenizer", "application/json", "400", "401", "404")
        | {"parameters": [{"name": "model", "in": "query", "schema": {"type": "string"}}]}
    }
    paths["/ready"] = {
        "get": _get("Whether every model has a backend that is up", "application/json", "503")
    }
    paths["/metrics"] = {"get": _get("Prometheus metrics, for admins", "text/plain", "401", "403")}
    return paths, schemas


def _post(path: str) -> dict[str, Any]:
    name = ({**REQUESTS, **FORMS, **_DIALECTS}[path]).__name__
    body_type = "multipart/form-data" if path in FORMS else "application/json"
    content: dict[str, Any] = {"application/json": {"schema": {"type": "object"}}}
    content |= _ANSWERS.get(path, {})
    if path not in _WHOLE:
        content |= _EVENTS
    return {
        "summary": _SUMMARIES[path],
        "requestBody": {
            "required": True,
            "content": {body_type: {"schema": {"$ref": f"#/components/schemas/{name}"}}},
        },
        "responses": {"200": {"description": "the answer", "content": content}}
        | describe_failures(_FAILURES, _ERRORS.get(path, "Error")),
    }


def _get(summary: str, content_type: str, *failures: str) -> dict[str, Any]:
    schema = {"type": "string" if content_type == "text/plain" else "object"}
    return {
        "summary": summary,
        "responses": {"200": {"description": "fine", "content": {content_type: {"schema": schema}}}}
        | {
            status: {
                "description": "not fine",
                "content": {"application/json": {"schema": {"type": "object"}}},
            }
            for status in failures
        },
    }

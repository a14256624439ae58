"""POST /tokenize and /detokenize, as vLLM has them: texts and conversations as tokens, and back."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Struct

from atoll.core.errors import AtollError
from atoll.engine.engine_errors import TextTooLongError
from atoll.engine.text import TextCodec
from atoll.runtime.http.handlers import Response
from atoll.runtime.instance.instance_requests import chat_tokens, cut_final_message
from atoll.runtime.instance.tools.call_history import read_messages
from atoll.runtime.openai import (
    DETOKENIZE,
    ApiError,
    DetokenizeRequest,
    TokenizeRequest,
    read_request,
)

MAX_TOKENS = 2**17
"""That one request turns into text, or text into, whatever the model takes."""


def read_tokens_request(path: str, body: bytes) -> TokenizeRequest | DetokenizeRequest:
    """Read a request to /tokenize or /detokenize; what is wrong is an ApiError."""
    # Lists of millions of tokens keep every other thread waiting while they are decoded.
    if path == DETOKENIZE and body.count(b",") > MAX_TOKENS + 64:
        raise _too_many("tokens")
    request = read_request(path, body)
    assert isinstance(request, TokenizeRequest | DetokenizeRequest)
    return request


class _Conversation(Struct):
    """Messages with all they have."""

    messages: list[dict[str, Any]] = []


_CONVERSATION = msgspec.json.Decoder(_Conversation)


def answer_tokens(
    request: TokenizeRequest | DetokenizeRequest, body: bytes, codec: TextCodec, max_length: int
) -> Response:
    """Answer a request that was read from `body`; takes long where the text is long."""
    if isinstance(request, DetokenizeRequest):
        return Response(msgspec.json.encode({"prompt": _text(request, codec)}))
    tokens = _tokens(request, body, codec)
    shown = [codec.token_name(token) for token in tokens] if request.return_token_strs else None
    answer = {
        "count": len(tokens),
        "max_model_len": max_length,
        "tokens": tokens,
        "token_strs": shown,
    }
    return Response(msgspec.json.encode(answer))


def _text(request: DetokenizeRequest, codec: TextCodec) -> str:
    if len(request.tokens) > MAX_TOKENS:
        raise _too_many("tokens")
    if any(token >= codec.vocabulary for token in request.tokens):
        raise ApiError(400, f"tokens are below {codec.vocabulary}", param="tokens")
    return codec.decode(request.tokens, skip_special=False)


def _tokens(request: TokenizeRequest, body: bytes, codec: TextCodec) -> list[int]:
    chat = request.messages is not None
    if chat == (request.prompt is not None):
        raise ApiError(400, "give a prompt, or messages", param="prompt")
    param = "messages" if chat else "prompt"
    try:
        if chat:
            tokens = _chat(request, _CONVERSATION.decode(body).messages, codec)
        else:
            special = request.add_special_tokens is not False
            text = request.prompt or ""
            tokens = codec.encode(text, special=special, max_tokens=MAX_TOKENS)
    except TextTooLongError as error:
        raise ApiError(400, str(error), param=param, code="context_length_exceeded") from error
    except AtollError as error:
        raise ApiError(400, str(error), param=param) from error
    if len(tokens) > MAX_TOKENS:
        raise _too_many(param)
    return tokens


def _chat(request: TokenizeRequest, given: list[dict[str, Any]], codec: TextCodec) -> list[int]:
    generate = request.add_generation_prompt is not False
    goes_on = bool(request.continue_final_message)
    if goes_on and request.add_generation_prompt:
        message = "either the last message goes on, or an answer begins"
        raise ApiError(400, message, param="continue_final_message")
    special = bool(request.add_special_tokens)
    if not goes_on and not special:
        return chat_tokens(given, request.tools, codec, MAX_TOKENS, generate=generate)
    messages = read_messages([_plain(message, number) for number, message in enumerate(given)])
    text = codec.render_chat(messages, tools=request.tools, generate=generate and not goes_on)
    if goes_on:
        text = cut_final_message(text, messages[-1]["content"])
    return codec.encode(text, special=special, max_tokens=MAX_TOKENS)


def _plain(message: dict[str, Any], number: int) -> dict[str, Any]:
    """Return a message with its content in one text."""
    where = f"messages[{number}]"
    if not isinstance(message.get("role"), str):
        raise ApiError(400, "a message has a role", param=f"{where}.role")
    content = message.get("content")
    if not isinstance(content, list):
        if content is not None and not isinstance(content, str):
            raise ApiError(400, "a content is a text", param=f"{where}.content")
        return message | {"content": content or ""}
    texts = [part.get("text") for part in content if isinstance(part, dict)]
    if len(texts) != len(content) or not all(isinstance(text, str) for text in texts):
        raise ApiError(400, "this model reads text only", param=f"{where}.content")
    return message | {"content": "".join(map(str, texts))}


def _too_many(param: str) -> ApiError:
    return ApiError(
        400,
        f"{param}: at most {MAX_TOKENS} tokens a request",
        param=param,
        code="context_length_exceeded",
    )

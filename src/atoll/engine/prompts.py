"""Conversations as prompts, where messages may hold vectors between their texts."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from atoll.engine.embeds import FramedVectors, PromptEmbeds, join_pieces
from atoll.engine.engine_errors import EngineError, TextTooLongError
from atoll.engine.text import TextCodec


def chat_prompt(
    codec: TextCodec,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    generate: bool = True,
    max_tokens: int | None = None,
    more: Mapping[str, Any] | None = None,
) -> tuple[list[int], PromptEmbeds | None]:
    """Return the tokens of a conversation in the model's own format, and the vectors among them.

    The content of a message is a text, or a list of texts and arrays [count, width] (or `FramedVectors`), in
    order. Text on either side of an array is tokenised on its own, as on either side of a special token.
    `max_tokens` as in `TextCodec.encode`; vectors count. `more` is for the chat template.
    """
    # Nobody can know the names, so no text of a message is taken for one.
    nonce = secrets.token_hex(16)
    arrays: list[Any] = []
    plain = [_with_names(message, nonce, arrays) for message in messages]
    vectors = sum(len(array) for array in arrays)
    if max_tokens is not None and vectors > max_tokens:
        raise TextTooLongError(f"{vectors} vectors are more than {max_tokens} tokens")
    if not arrays:
        tokens = codec.chat(plain, tools=tools, generate=generate, max_tokens=max_tokens, more=more)
        return tokens, None
    pieces: list[Any] = []
    rest = codec.render_chat(plain, tools=tools, generate=generate, more=more)
    for number, array in enumerate(arrays):
        before, name, rest = rest.partition(_name(nonce, number))
        if not name or nonce in before:
            raise EngineError("the chat template does not take vectors where they stand")
        if isinstance(array, FramedVectors):
            before, rest, array = before + array.before, array.after + rest, array.rows
        pieces += [codec.encode(before, special=False, max_tokens=max_tokens), array]
    if nonce in rest:
        raise EngineError("the chat template does not take vectors where they stand")
    pieces.append(codec.encode(rest, special=False, max_tokens=max_tokens))
    return join_pieces(pieces)


def _with_names(message: Mapping[str, Any], nonce: str, arrays: list[Any]) -> Mapping[str, Any]:
    """Return the message with its content in one text, in which names stand for arrays."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    texts = []
    for part in content:
        if isinstance(part, str):
            texts.append(part)
        else:
            texts.append(_name(nonce, len(arrays)))
            arrays.append(part)
    return dict(message) | {"content": "".join(texts)}


def _name(nonce: str, number: int) -> str:
    return f"<{nonce}:{number}>"

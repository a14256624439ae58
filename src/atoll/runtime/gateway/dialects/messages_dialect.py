"""Anthropic's `/v1/messages` as a dialect: answers, streams, errors, counts of tokens and lists of models."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, ClassVar

import msgspec

from atoll.runtime.gateway.dialects.chat_answer import (
    AnswerBlock,
    AnswerEnding,
    BlockKind,
    ChatAnswer,
    ChatHead,
    TokenCounts,
)
from atoll.runtime.gateway.dialects.chat_stream import StreamTranslator
from atoll.runtime.gateway.dialects.dialect import Dialect, Translation
from atoll.runtime.gateway.dialects.dialect_reading import is_writable, write
from atoll.runtime.gateway.dialects.kept_responses import OwnedResponses
from atoll.runtime.gateway.dialects.messages_request import (
    NESTED,
    CountTokensRequest,
    MessageInput,
    MessagesRequest,
    chat_body,
    input_fields,
    read_count,
    read_messages,
)
from atoll.runtime.gateway.events import read_chunk
from atoll.runtime.gateway.faults import server_fault
from atoll.runtime.openai import TOKENIZE, ApiError

_STOP_REASONS = {
    "length": "max_tokens",
    "tool_calls": "tool_use",
    "function_call": "tool_use",
    "content_filter": "refusal",
}
"""Why an answer stopped: chat's word, Anthropic's word."""
_DELTAS = {
    "text": ("text_delta", "text"),
    "refusal": ("text_delta", "text"),
    "reasoning": ("thinking_delta", "thinking"),
    "call": ("input_json_delta", "partial_json"),
}
"""For each kind of block: the type of its deltas, and the field with what is new."""
_TOLD = ("model", "messages", "tools", "add_generation_prompt", "continue_final_message")
"""Fields of a chat request that a tokenizer needs."""
_ERROR_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}
"""Of errors, by their status; others of the client are `invalid_request_error`, else `api_error`."""


class TranslatedMessages(Translation):
    """One request to `/v1/messages`, and the message that answers it."""

    def __init__(self, request: MessagesRequest, seed: str) -> None:
        super().__init__(chat_body(request), request.model, seed)
        self._stops = frozenset(request.stop_sequences or ())
        self._thinks = request.thinking is not None and request.thinking.shown

    def shows(self, block: AnswerBlock) -> bool:
        """Whether the client is to see a block; reasoning only if it asked for thinking."""
        return self._thinks or block.kind != "reasoning"

    def stream(self) -> MessagesStream:
        """Return the translator of the stream of the answer."""
        return MessagesStream(self)

    def whole(self, answer: ChatAnswer) -> dict[str, Any]:
        """Return the message of an answer that is all there."""
        ending = answer.ending
        content = [content_block(block) for block in answer.blocks if self.shows(block)]
        stop = self.stop(ending, {block.kind for block in answer.blocks})
        return self.begun(answer.head, content) | stop | {"usage": usage(ending.tokens)}

    def begun(self, head: ChatHead, content: list[dict[str, Any]]) -> dict[str, Any]:
        """Return a message that has not stopped."""
        return {
            "id": f"msg_{self.seed}",
            "type": "message",
            "role": "assistant",
            "model": head.model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage(head.tokens),
        }

    def stop(self, ending: AnswerEnding, kinds: set[BlockKind]) -> dict[str, Any]:
        """Return why an answer with blocks of these kinds stopped."""
        reason = _STOP_REASONS.get(ending.reason)
        sequence = None
        if reason is None and "call" in kinds:
            # Some engines say that they stopped where they call a tool.
            reason = "tool_use"
        elif reason is None and "refusal" in kinds:
            reason = "refusal"
        elif reason is None and ending.stop in self._stops:
            reason, sequence = "stop_sequence", ending.stop
        return {"stop_reason": reason or "end_turn", "stop_sequence": sequence}


def usage(tokens: TokenCounts) -> dict[str, Any]:
    """Return counts of tokens; those read from a cache are apart."""
    return {
        "input_tokens": tokens.prompt - tokens.cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": tokens.cached,
        "output_tokens": tokens.completion,
    }


def content_block(block: AnswerBlock) -> dict[str, Any]:
    """Return a block that is all there."""
    text = block.text
    if block.kind == "call":
        return empty_block(block) | {"input": read_input(text)}
    return empty_block(block) | {"thinking" if block.kind == "reasoning" else "text": text}


def empty_block(block: AnswerBlock) -> dict[str, Any]:
    """Return a block that has no text yet."""
    if block.kind == "call":
        return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": {}}
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": "", "signature": ""}
    # No `citations`: where there are none, readers of Anthropic's own answers refuse null (Vercel's).
    return {"type": "text", "text": ""}


def read_input(arguments: str) -> dict[str, Any]:
    """Return the arguments of a call; what is no JSON object is kept as `INVALID_JSON`."""
    if not arguments.strip():
        return {}
    try:
        found = msgspec.json.decode(arguments.encode())
    except (msgspec.DecodeError, RecursionError):
        found = None
    return found if isinstance(found, dict) and is_writable(found) else {"INVALID_JSON": arguments}


class MessagesStream(StreamTranslator):
    """Stream of `/v1/messages`: one message, its blocks one after the other."""

    counts_first = True

    def __init__(self, message: TranslatedMessages) -> None:
        super().__init__(message.asked, message.seed)
        self._message = message
        self._index = 0
        self._kinds: set[BlockKind] = set()

    def write_head(self, head: ChatHead) -> None:
        """Write that the message begins, with what the prompt took where its engine says so by now."""
        self._write("message_start", message=self._message.begun(head, []))

    def write_open(self, block: AnswerBlock) -> None:
        """Write that a block begins."""
        self._kinds.add(block.kind)
        if self._message.shows(block):
            started = empty_block(block)
            self._write("content_block_start", index=self._index, content_block=started)

    def write_text(self, block: AnswerBlock, text: str) -> None:
        """Write the text that a block has more."""
        if self._message.shows(block):
            kind, field = _DELTAS[block.kind]
            delta = {"type": kind, field: text}
            self._write("content_block_delta", index=self._index, delta=delta)

    def write_close(self, block: AnswerBlock, *, whole: bool) -> None:
        """Write that a block is over; why the last one was cut off is said at the end."""
        del whole
        if self._message.shows(block):
            self._write("content_block_stop", index=self._index)
            self._index += 1

    def write_ending(self, ending: AnswerEnding) -> None:
        """Write why the message stopped and what it used."""
        delta = self._message.stop(ending, self._kinds)
        self._write("message_delta", delta=delta, usage=usage(ending.tokens))
        self._write("message_stop")

    def write_failure(self, message: str, code: str) -> None:
        """Write that the message broke off."""
        del code
        self._write("error", error={"type": "api_error", "message": message})

    def _write(self, kind: str, **fields: Any) -> None:
        self._write_event(kind, {"type": kind, **fields})


class MessagesDialect(Dialect):
    """Anthropic's API of messages."""

    path = "/v1/messages"
    request: ClassVar[type[MessageInput]] = MessagesRequest

    def authorization(self, headers: dict[bytes, bytes]) -> bytes | None:
        """Return the `authorization` header, or one made of `x-api-key`; two that differ are an ApiError.

        Whoever stands before us may have read the other one.
        """
        key = headers.get(b"x-api-key")
        given = headers.get(b"authorization")
        if key is None:
            return given
        made = b"Bearer " + key
        if given is not None and given != made:
            raise ApiError(400, "authorization and x-api-key show two keys", code="two_keys")
        return made

    def translate(
        self, body: bytes, seed: str, responses: OwnedResponses | None = None
    ) -> Translation:
        """Read a request."""
        del responses
        return TranslatedMessages(read_messages(body), seed)

    def error(self, error: ApiError, request_id: str) -> bytes:
        """Return an error in Anthropic's shape."""
        usual = "invalid_request_error" if error.status < 500 else "api_error"
        message = error.message
        if error.code == "context_length_exceeded":
            # Anthropic's words, which agents look for before they shorten a conversation.
            message = f"prompt is too long: {message}"
        said = {"type": _ERROR_KINDS.get(error.status, usual), "message": message}
        named = {"request_id": request_id} if request_id else {}
        return msgspec.json.encode({"type": "error", "error": said, **named})

    def headers(self, request_id: bytes) -> bytes:
        """Return `request-id`, as Anthropic's clients read it."""
        return b"request-id: %b\r\n" % request_id


class TranslatedCount(Translation):
    """One request to `/v1/messages/count_tokens`."""

    def answer(self, body: bytes) -> bytes:
        """Return how many tokens there are."""
        count = (read_chunk(body) or {}).get("count")
        if type(count) is not int:
            raise server_fault(502, "the backend's answer is no count of tokens", "upstream_error")
        return msgspec.json.encode({"input_tokens": count})

    def whole(self, answer: ChatAnswer) -> dict[str, Any]:
        """Return nothing: what counts tokens answers no chat."""
        raise NotImplementedError

    def stream(self) -> None:
        """Return None: a count is never a stream."""


class CountDialect(MessagesDialect):
    """Anthropic's count of the tokens of a request, by the model's own tokenizer."""

    path = "/v1/messages/count_tokens"
    endpoint = TOKENIZE
    request = CountTokensRequest

    def translate(
        self, body: bytes, seed: str, responses: OwnedResponses | None = None
    ) -> Translation:
        """Read a request."""
        del responses
        request = read_count(body)
        chat = input_fields(request)
        told = {name: chat[name] for name in _TOLD if name in chat}
        if request.models is not None:
            told["models"] = request.models
        return TranslatedCount(write(told, NESTED), request.model, seed)


# Lists of models


def asks_for_anthropic(headers: Mapping[bytes, bytes]) -> bool:
    """Return whether it is a client of Anthropic's that asks: all of them say which version they speak."""
    return b"anthropic-version" in headers


def describe_model(name: str, created_s: float) -> dict[str, object]:
    """Return one model; `created_s` is a Unix time."""
    created = datetime.fromtimestamp(int(created_s), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {"type": "model", "id": name, "display_name": name, "created_at": created}


def list_models(names: list[str], created_s: float) -> dict[str, object]:
    """Return all of them, on one page."""
    return {
        "data": [describe_model(name, created_s) for name in names],
        "has_more": False,
        "first_id": names[0] if names else None,
        "last_id": names[-1] if names else None,
    }

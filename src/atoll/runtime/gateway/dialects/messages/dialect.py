"""`/v1/messages` as a dialect."""

from __future__ import annotations

import msgspec

from atoll.runtime.gateway.dialects.chat import read_answer
from atoll.runtime.gateway.dialects.messages.answer import MessageWriter
from atoll.runtime.gateway.dialects.messages.count import (
    CountTokensRequest,
    TranslatedCount,
    read_count,
)
from atoll.runtime.gateway.dialects.messages.request import (
    MessageInput,
    MessagesRequest,
    chat_body,
    read_messages,
)
from atoll.runtime.gateway.dialects.messages.stream import MessagesStream
from atoll.runtime.openai import CHAT, TOKENIZE, ApiError

_KINDS = {
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


class TranslatedMessages:
    """One request to `/v1/messages`."""

    def __init__(self, request: MessagesRequest, seed: str) -> None:
        self.body = chat_body(request)
        self._asked = request.model
        self._seed = seed
        self._writer = MessageWriter(request, seed)

    def answer(self, body: bytes) -> bytes:
        """Return a whole chat answer as a message."""
        answer = read_answer(body, self._asked, self._seed)
        return msgspec.json.encode(self._writer.whole(answer.head, answer.blocks, answer.ending))

    def stream(self) -> MessagesStream:
        """Return what translates the stream of the answer."""
        return MessagesStream(self._writer, self._asked, self._seed)


class MessagesDialect:
    """Anthropic's API of messages."""

    path = "/v1/messages"
    endpoint = CHAT
    request: type[MessageInput] = MessagesRequest

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

    def translate(self, body: bytes, seed: str) -> TranslatedMessages | TranslatedCount:
        """Read a request."""
        return TranslatedMessages(read_messages(body), seed)

    def error(self, error: ApiError, request_id: str) -> bytes:
        """Return an error in Anthropic's shape."""
        usual = "invalid_request_error" if error.status < 500 else "api_error"
        said = {"type": _KINDS.get(error.status, usual), "message": error.message}
        named = {"request_id": request_id} if request_id else {}
        return msgspec.json.encode({"type": "error", "error": said, **named})

    def headers(self, request_id: bytes) -> bytes:
        """Return `request-id`, as Anthropic's clients read it."""
        return b"request-id: %b\r\n" % request_id


class CountDialect(MessagesDialect):
    """Anthropic's count of the tokens of a request, by the model's own tokenizer."""

    path = "/v1/messages/count_tokens"
    endpoint = TOKENIZE
    request = CountTokensRequest

    def translate(self, body: bytes, seed: str) -> TranslatedCount:
        """Read a request."""
        del seed
        return TranslatedCount(read_count(body))

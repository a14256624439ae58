"""`/v1/responses` as a dialect."""

from __future__ import annotations

import msgspec

from atoll.runtime.gateway.dialects.chat import read_answer
from atoll.runtime.gateway.dialects.responses.answer import ResponseWriter
from atoll.runtime.gateway.dialects.responses.request import (
    ResponsesRequest,
    chat_body,
    read_responses,
)
from atoll.runtime.gateway.dialects.responses.stream import ResponsesStream
from atoll.runtime.openai import CHAT, ApiError


class TranslatedResponses:
    """One request to `/v1/responses`."""

    def __init__(self, request: ResponsesRequest, seed: str) -> None:
        self.body = chat_body(request)
        self._asked = request.model
        self._seed = seed
        self._writer = ResponseWriter(request, seed)

    def answer(self, body: bytes) -> bytes:
        """Return a whole chat answer as a response."""
        answer = read_answer(body, self._asked, self._seed)
        response = self._writer.whole(answer.head, answer.blocks, answer.ending)
        return msgspec.json.encode(response)

    def stream(self) -> ResponsesStream:
        """Return what translates the stream of the answer."""
        return ResponsesStream(self._writer, self._asked, self._seed)


class ResponsesDialect:
    """OpenAI's API of responses: errors and keys are those of chat."""

    path = "/v1/responses"
    endpoint = CHAT
    request = ResponsesRequest

    def authorization(self, headers: dict[bytes, bytes]) -> bytes | None:
        """Return the `authorization` header."""
        return headers.get(b"authorization")

    def translate(self, body: bytes, seed: str) -> TranslatedResponses:
        """Read a request."""
        return TranslatedResponses(read_responses(body), seed)

    def error(self, error: ApiError, request_id: str) -> bytes:
        """Return an error in OpenAI's shape."""
        del request_id
        return error.body()

    def headers(self, request_id: bytes) -> bytes:
        """Return nothing: `x-request-id` is in every answer."""
        del request_id
        return b""

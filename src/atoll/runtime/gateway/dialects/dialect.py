"""Base of dialects: requests into chat, answers, streams and errors out of it. Nothing here does I/O."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import msgspec

from atoll.runtime.gateway.dialects.chat_answer import ChatAnswer, read_answer
from atoll.runtime.gateway.dialects.chat_stream import StreamTranslator
from atoll.runtime.gateway.dialects.kept_responses import OwnedResponses
from atoll.runtime.openai import CHAT, ApiError


class Translation(ABC):
    """One request of a dialect, translated: `body` is that of the chat request that means the same.

    `asked` is the model that was asked for. `seed` is unlike that of any other request: ids are made of it.
    """

    def __init__(self, body: bytes, asked: str, seed: str) -> None:
        self.body = body
        self.asked = asked
        self.seed = seed

    def answer(self, body: bytes) -> bytes:
        """Return a whole answer in the dialect; one that is none is an ApiError (502)."""
        return msgspec.json.encode(self.whole(read_answer(body, self.asked, self.seed)))

    @abstractmethod
    def whole(self, answer: ChatAnswer) -> dict[str, Any]:
        """Return a whole chat answer as the dialect has it."""

    @abstractmethod
    def stream(self) -> StreamTranslator | None:
        """Return the translator of the chat stream of the answer; None: it is never one."""


class Dialect(ABC):
    """An API that is spoken by translation; keys, errors and headers are chat's unless it has its own."""

    path: ClassVar[str]
    endpoint: ClassVar[str] = CHAT
    """Endpoint it is translated to: chat, or the one that counts its tokens."""
    request: ClassVar[type[msgspec.Struct]]
    """Type that checks its requests, for the description of the API."""

    @abstractmethod
    def translate(
        self, body: bytes, seed: str, responses: OwnedResponses | None = None
    ) -> Translation:
        """Read a request; what is wrong with it, or cannot be done, is an ApiError.

        `responses` are conversations of the same key; None: none are kept.
        """

    def authorization(self, headers: dict[bytes, bytes]) -> bytes | None:
        """Return the key of a caller, as an `authorization` header holds it; two keys are an ApiError."""
        return headers.get(b"authorization")

    def error(self, error: ApiError, request_id: str) -> bytes:
        """Return an error as JSON; `request_id` is empty where it has none yet."""
        del request_id
        return error.body()

    def headers(self, request_id: bytes) -> bytes:
        """Return more headers of an answer, with their line ends; `x-request-id` is in every answer."""
        del request_id
        return b""

"""What a dialect is: requests into chat, answers, streams and errors out of it. Nothing here does I/O."""

from __future__ import annotations

from typing import Protocol

import msgspec

from atoll.runtime.openai import ApiError


class StreamTranslator(Protocol):
    """Turns the events of one chat stream into those of a dialect."""

    def feed(self, data: bytes) -> bytes:
        """Take bytes of the stream, cut anywhere; return the events of the dialect they bring."""
        ...

    def end(self) -> bytes:
        """The stream of chat is over: return the rest. A stream without its end ends as broken off."""
        ...


class Translation(Protocol):
    """One request of a dialect, translated."""

    @property
    def body(self) -> bytes:
        """The body of the request that means the same."""
        ...

    def answer(self, body: bytes) -> bytes:
        """Return a whole answer in the dialect; one that is none is an ApiError (502)."""
        ...

    def stream(self) -> StreamTranslator | None:
        """Return what translates the chat stream of the answer; None: it is never one."""
        ...


class Dialect(Protocol):
    """An API that is spoken by translation."""

    @property
    def path(self) -> str:
        """Where it is asked."""
        ...

    @property
    def endpoint(self) -> str:
        """What it is translated to: chat, or what counts its tokens."""
        ...

    @property
    def request(self) -> type[msgspec.Struct]:
        """What checks its requests, for the description of the API."""
        ...

    def authorization(self, headers: dict[bytes, bytes]) -> bytes | None:
        """Return the key of a caller, as an `authorization` header holds it; two keys are an ApiError."""
        ...

    def translate(self, body: bytes, seed: str) -> Translation:
        """Read a request; what is wrong with it, or cannot be done, is an ApiError.

        `seed` is unlike that of any other request: ids are made of it.
        """
        ...

    def error(self, error: ApiError, request_id: str) -> bytes:
        """Return an error as JSON; `request_id` is empty where it has none yet."""
        ...

    def headers(self, request_id: bytes) -> bytes:
        """Return more headers of an answer, with their line ends."""
        ...

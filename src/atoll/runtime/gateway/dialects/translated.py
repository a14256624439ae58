"""A client that speaks a dialect: a relay answers it in chat, and it hears its own language."""

from __future__ import annotations

import msgspec

from atoll.runtime.gateway.dialects.chat_stream import StreamTranslator
from atoll.runtime.gateway.dialects.dialect import Dialect, Translation
from atoll.runtime.gateway.dialects.kept_responses import OwnedResponses
from atoll.runtime.gateway.front_client import FrontClient
from atoll.runtime.gateway.kept_streams import NumberedClient
from atoll.runtime.http.answering import headers_of
from atoll.runtime.http.http_server import Connection, Request
from atoll.runtime.openai import ApiError, parsed_bytes

_LARGE_BYTES = 2**20


class ShapedError(ApiError):
    """An error in the shape of a dialect, for what answers before a request is translated."""

    def __init__(self, error: ApiError, dialect: Dialect) -> None:
        super().__init__(
            error.status,
            error.message,
            kind=error.kind,
            param=error.param,
            code=error.code,
            retry_after_s=error.retry_after_s,
            allow=error.allow,
        )
        self._body = dialect.error(error, "")

    def body(self) -> bytes:
        """Return the JSON that clients of the dialect read."""
        return self._body


class TranslatedClient(FrontClient["Connection | NumberedClient"]):
    """Stands before a connection, for a relay (`http_server.Connection` says what its methods mean)."""

    def __init__(
        self, connection: Connection | NumberedClient, dialect: Dialect, request: Request
    ) -> None:
        super().__init__(connection)
        self._dialect = dialect
        self._request = request
        self._translation: Translation | None = None
        self._stream: StreamTranslator | None = None

    def show_key(self) -> bytes | None:
        """Put the key of the caller where it is looked for, and return it; two keys are an ApiError."""
        headers = self._request.headers
        authorization = self._dialect.authorization(headers)
        if authorization is not None:
            headers[b"authorization"] = authorization
        return authorization

    def translate(self, responses: OwnedResponses | None = None) -> Request:
        """Return the request as backends get it; what is wrong with it is an ApiError.

        `responses` are conversations that it may go on with.
        """
        asked = self._request
        if asked.method != b"POST":
            raise ApiError(
                405,
                f"use POST for {self._dialect.path}",
                code="method_not_allowed",
                allow="POST",
            )
        if len(asked.body) > _LARGE_BYTES:
            # It is read twice: as what it is, and as what becomes of it.
            self._connection.hold(parsed_bytes(asked.body))
        # Of all requests with the same trace, each is a span of its own.
        seed = asked.trace[3:35] + asked.trace[36:52]
        self._translation = translation = self._dialect.translate(asked.body, seed, responses)
        sent = Request(asked.method, self._dialect.endpoint.encode(), asked.headers, asked.query)
        sent.body = translation.body
        sent.id, sent.trace = asked.id, asked.trace
        sent.keep_alive, sent.old = asked.keep_alive, asked.old
        asked.body = b""
        return sent

    def respond(
        self,
        status: int,
        body: bytes,
        content_type: bytes = b"application/json",
        extra: bytes = b"",
    ) -> None:
        """Answer with a whole answer of chat, or with a backend's error."""
        if status >= 400 or self._translation is None:
            self.respond_error(_read_error(status, body))
            return
        try:
            body = self._translation.answer(body)
        except ApiError as error:
            self.respond_error(error)
            return
        del content_type
        self._connection.respond(200, body, extra=extra + self._headers())

    def respond_error(self, error: ApiError) -> None:
        """Answer with an error, in the dialect's shape."""
        body = self._dialect.error(error, self._request.id.decode())
        self._connection.respond(error.status, body, extra=headers_of(error) + self._headers())

    def begin_stream(self, headers: bytes = b"") -> None:
        """Begin a stream of events."""
        if self._translation is not None:
            self._stream = self._translation.stream()
        self._connection.begin_stream(headers + self._headers())

    def send(self, data: bytes) -> None:
        """Send what events of chat bring; some bring nothing."""
        if self._stream is not None:
            events = self._stream.feed(data)
            if events:
                self._connection.send(events)

    def end_stream(self, data: bytes) -> None:
        """Send what the last events bring, and end the stream."""
        events = b""
        if self._stream is not None:
            events = self._stream.feed(data) + self._stream.end()
        self._connection.end_stream(events)

    def _headers(self) -> bytes:
        return self._dialect.headers(self._request.id)


AnsweredClient = Connection | NumberedClient | TranslatedClient
"""Who a relay answers."""


def _read_error(status: int, body: bytes) -> ApiError:
    """Return an error of a backend, which has OpenAI's shape."""
    try:
        data = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError):
        data = None
    found = data.get("error") if isinstance(data, dict) else None
    said = found if isinstance(found, dict) else {}
    message, kind = said.get("message"), said.get("type")
    param, code = said.get("param"), said.get("code")
    usual = "invalid_request_error" if status < 500 else "server_error"
    return ApiError(
        status,
        message if isinstance(message, str) else f"the backend answered with status {status}",
        kind=kind if isinstance(kind, str) else usual,
        param=param if isinstance(param, str) else None,
        code=code if isinstance(code, str) else None,
    )

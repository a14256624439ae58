"""Pages of other origins that may ask the gateway from a browser (CORS). Off unless origins are named.

No answer ever permits credentials: a browser sends no cookies of its own accord, and a key travels in a
header that a page has to name. What is for those who run the gateway is never opened to pages.
"""

from __future__ import annotations

import re

from pydantic import Field, field_validator

from atoll.core.frozen import Frozen
from atoll.runtime.http.answering import AnswerWriter
from atoll.runtime.http.http_request import Request

ANY = "*"
_ORIGIN = re.compile(
    r"https?://[A-Za-z0-9.\[\]:_-]{1,255}|[a-z][a-z0-9+.-]{1,31}://[A-Za-z0-9._-]{1,255}"
)
_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,64}")
_SENT = (
    "authorization",
    "content-type",
    "x-api-key",
    "x-request-id",
    "traceparent",
    "tracestate",
    "x-atoll-providers",
    "x-atoll-regions",
    "x-atoll-min-precision",
    "x-atoll-min-context",
    "x-atoll-gpus",
    "x-atoll-stability",
    "x-atoll-node",
    "x-atoll-fallback",
    "x-atoll-session",
    "x-atoll-events",
    "x-atoll-resume",
    "last-event-id",
    "openai-organization",
    "openai-project",
    "openai-beta",
    "anthropic-version",
    "anthropic-beta",
    "anthropic-dangerous-direct-browser-access",
    "x-stainless-arch",
    "x-stainless-async",
    "x-stainless-helper-method",
    "x-stainless-lang",
    "x-stainless-os",
    "x-stainless-package-version",
    "x-stainless-poll-helper",
    "x-stainless-retry-count",
    "x-stainless-runtime",
    "x-stainless-runtime-version",
    "x-stainless-timeout",
)
_SHOWN = (
    b"x-request-id, retry-after, x-atoll-model, x-atoll-node, x-atoll-provider, x-atoll-path, "
    b"x-atoll-stand-in, x-atoll-usage, x-atoll-ignored, x-atoll-stream"
)
_METHODS = b"GET, HEAD, POST, PUT, PATCH, DELETE"


class CorsSettings(Frozen):
    """Whose pages may ask, and what they may send."""

    origins: tuple[str, ...] = Field(min_length=1)
    """`https://app.example`, or `*` for all."""
    headers: tuple[str, ...] = _SENT
    """Headers that a page may send; `*`: any but `authorization`, as browsers have it."""
    max_age_s: int = Field(600, ge=0, le=86_400)
    """How long a browser need not ask again."""

    @field_validator("origins")
    @classmethod
    def _are_origins(cls, origins: tuple[str, ...]) -> tuple[str, ...]:
        for origin in origins:
            if origin != ANY and _ORIGIN.fullmatch(origin) is None:
                raise ValueError(
                    f"{origin[:200]!r} is no origin: write https://app.example (no path), or *"
                )
        return tuple(o if o == ANY else o.lower() for o in origins)

    @field_validator("headers")
    @classmethod
    def _are_names(cls, headers: tuple[str, ...]) -> tuple[str, ...]:
        for header in headers:
            if _NAME.fullmatch(header) is None:
                raise ValueError(f"{header[:200]!r} is no name of a header")
        return headers


class CorsHeaders:
    """Settings of CORS, as headers of answers."""

    __slots__ = ("_any", "_origins", "_preflight")

    def __init__(self, settings: CorsSettings) -> None:
        self._any = ANY in settings.origins
        self._origins = frozenset(origin.encode() for origin in settings.origins)
        self._preflight = (
            b"access-control-allow-methods: %b\r\naccess-control-allow-headers: %b\r\n"
            b"access-control-max-age: %d\r\n"
            % (_METHODS, ", ".join(settings.headers).encode(), settings.max_age_s)
        )

    def allows(self, origin: bytes) -> bool:
        """Whether pages of an origin may ask."""
        return self._any or origin.lower() in self._origins

    def mark(self, request: Request) -> None:
        """Have whatever answers a request of a page say that the page may read it."""
        origin = request.headers.get(b"origin")
        # With `*` all pages get the same answer: no cache can mix them up.
        if self._any:
            allowed = ANY.encode()
        elif origin is not None and self.allows(origin):
            allowed = origin
        else:
            # A cache must not give this answer to a page that may have it, or the other way round.
            request.extra = b"vary: origin\r\n"
            return
        request.extra = (
            b"access-control-allow-origin: %b\r\naccess-control-expose-headers: %b\r\n%b"
            % (allowed, _SHOWN, b"" if self._any else b"vary: origin\r\n")
        )

    def answer(self, client: AnswerWriter, request: Request) -> bool:
        """Answer a browser that asks whether a page may ask; return whether it was one. Needs no key."""
        headers = request.headers
        if (
            request.method != b"OPTIONS"
            or b"access-control-request-method" not in headers
            # `mark` came first, and says whether the page may ask.
            or not request.extra.startswith(b"access-control-allow-origin")
        ):
            return False
        client.respond(200, b"", b"text/plain", self._preflight)
        return True

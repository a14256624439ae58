"""Other APIs than OpenAI's chat, translated into chat at the edge of the gateway.

A request in a dialect becomes one to `/v1/chat/completions` before anything else looks at it, and what
comes back is translated on its way to the client (`translated`). So keys, policies, failover, continued
streams and the ledger hold for all dialects alike, whatever a backend itself could speak.

`responses` is OpenAI's `/v1/responses`, `messages` is Anthropic's `/v1/messages`. What they share:
`dialect` (the base class), `dialect_reading` (checks), `conversation` (turns into messages), `chat_answer`
and `chat_stream` (answers and streams of chat, taken apart). Nothing here does I/O or knows the gateway.
"""

from __future__ import annotations

from atoll.runtime.gateway.dialects.dialect import Dialect
from atoll.runtime.gateway.dialects.messages_dialect import CountDialect, MessagesDialect
from atoll.runtime.gateway.dialects.responses_dialect import ResponsesDialect
from atoll.runtime.gateway.dialects.translated import AnsweredClient, ShapedError, TranslatedClient
from atoll.runtime.openai import ApiError

__all__ = ["DIALECTS", "AnsweredClient", "Dialect", "TranslatedClient", "shape_error", "shown_key"]

DIALECTS: dict[bytes, Dialect] = {
    dialect.path.encode(): dialect
    for dialect in (ResponsesDialect(), MessagesDialect(), CountDialect())
}
"""By their paths as in a request."""
_ALL_KINDS = DIALECTS[MessagesDialect.path.encode()]


def shape_error(error: ApiError, path: bytes) -> ApiError:
    """Return an error as it is said at a path."""
    dialect = DIALECTS.get(path)
    return error if dialect is None else ShapedError(error, dialect)


def shown_key(path: bytes, headers: dict[bytes, bytes]) -> bytes | None:
    """Return the key that a caller of a path shows, as an `authorization` header holds it.

    Lists of models are asked for by clients of every kind.
    """
    dialect = _ALL_KINDS if path.startswith(b"/v1/models") else DIALECTS.get(path)
    return headers.get(b"authorization") if dialect is None else dialect.authorization(headers)

"""One request to /tokenize or /detokenize on its way to a backend that has the model's tokenizer.

Atoll's instances, vLLM and SGLang take such requests as they are. llama.cpp has endpoints of the same names
with other fields: for it, requests and answers are translated. No tokens are counted: none are generated.
"""

from __future__ import annotations

from typing import Any

import msgspec

from atoll.engines.table import find_engine
from atoll.runtime.gateway.relay import Relay
from atoll.runtime.openai import (
    DETOKENIZE,
    TOKENIZE,
    ApiError,
    DetokenizeRequest,
    TokenizeRequest,
    TokensRequest,
    Usage,
)
from atoll.runtime.pool.member import Member

TOKEN_ENDPOINTS = frozenset({TOKENIZE, DETOKENIZE})


class TokenRelay(Relay):
    """A request for tokens or their text, and what has become of it so far."""

    request: TokensRequest
    _unable: ApiError | None = None
    """Why backends that are there cannot do it."""

    def choose(self, now_s: float) -> Member | None:
        """Return the backend to try next, and write the request as that backend reads it."""
        member = super().choose(now_s)
        while member is not None:
            try:
                own = translate_request(self.request, member.backend.kind)
            except ApiError as error:
                self._unable = error
                if member.name in self.attempts.avoid:
                    return None
                self.attempts.avoid |= {member.name}
                member = super().choose(now_s)
            else:
                self.body = self._body if own is None else own
                return member
        return None

    def on_nobody(self, now_s: float) -> None:
        """Tell the client if those who are there cannot do it; else wait as usual."""
        if self._unable is not None and not self.attempts.backends:
            self._fail(self._unable)
        else:
            super().on_nobody(now_s)

    def _end_answer(self) -> None:
        member, answer = self.attempts.member, self._answer
        if member is not None and answer.status == 200:
            own = translate_answer(self.request, member.backend.kind, b"".join(answer.parts))
            if own is None:
                self._fail_over("the answer holds no tokens and no text")
                return
            answer.parts = [own]
        super()._end_answer()

    def _find_usage(self, body: bytes) -> Usage | None:
        del body
        return Usage()

    def _note_success(self) -> None:
        # How fast a tokenizer is says nothing of how fast the model is.
        usage, self._answer.usage = self._answer.usage, None
        super()._note_success()
        self._answer.usage = usage


def translate_request(request: TokensRequest, kind: str) -> bytes | None:
    """Return the body as a backend of a kind reads it, or None: as it came.

    What such a backend cannot do is an ApiError (400).
    """
    engine = find_engine(kind)
    if engine.tokenizes_messages:
        return None
    if isinstance(request, DetokenizeRequest):
        return msgspec.json.encode({"tokens": request.tokens})
    if request.prompt is None or request.messages is not None:
        message = f"{engine.title} tokenises a prompt, and no messages"
        raise ApiError(400, message, param="messages")
    body = {
        "content": request.prompt,
        "add_special": request.add_special_tokens is not False,
        "parse_special": True,
        "with_pieces": bool(request.return_token_strs),
    }
    return msgspec.json.encode(body)


def translate_answer(request: TokensRequest, kind: str, body: bytes) -> bytes | None:
    """Return an answer in vLLM's shape, or None: it holds nothing that was asked for."""
    if find_engine(kind).vllm_tokens:
        return body
    try:
        data = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError):
        return None
    if not isinstance(data, dict):
        return None
    if isinstance(request, TokenizeRequest):
        return _tokens(data, body)
    if isinstance(data.get("prompt"), str):
        return body
    # llama.cpp calls it the content, SGLang the text.
    text = data.get("content", data.get("text"))
    return msgspec.json.encode({"prompt": text}) if isinstance(text, str) else None


def _tokens(data: dict[str, Any], body: bytes) -> bytes | None:
    tokens = data.get("tokens")
    if not isinstance(tokens, list):
        return None
    if isinstance(data.get("count"), int):
        return body
    names: list[object] | None = None
    if tokens and all(isinstance(token, dict) for token in tokens):
        names = [_piece(token.get("piece")) for token in tokens]
        tokens = [token.get("id") for token in tokens]
    answer = {"count": len(tokens), "max_model_len": None, "tokens": tokens, "token_strs": names}
    return msgspec.json.encode(answer)


def _piece(piece: object) -> object:
    """Return a token's text; llama.cpp writes one that is no text as a list of its bytes."""
    if not isinstance(piece, list):
        return piece
    values = [value for value in piece if isinstance(value, int) and 0 <= value < 256]
    return bytes(values).decode(errors="replace")

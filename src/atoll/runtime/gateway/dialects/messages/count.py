"""Requests to `/v1/messages/count_tokens`: what a message would take, as the model's tokenizer counts it."""

from __future__ import annotations

import msgspec

from atoll.runtime.gateway.dialects.messages.request import MessageInput, input_fields
from atoll.runtime.gateway.dialects.reading import read, refuse_given
from atoll.runtime.gateway.events import read_chunk
from atoll.runtime.openai import ApiError, Fallbacks

_TOLD = ("model", "messages", "tools", "add_generation_prompt", "continue_final_message")
"""What a tokenizer has to know of a chat request."""
_REFUSED = {
    "mcp_servers": ("there is no such thing here", "call MCP servers from the client, as tools")
}


class CountTokensRequest(MessageInput, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/messages/count_tokens."""

    models: Fallbacks = None


_DECODER = msgspec.json.Decoder(CountTokensRequest)


def read_count(body: bytes) -> CountTokensRequest:
    """Read and check a request; what is wrong, or not to be had here, is an ApiError."""
    request = read(_DECODER, body)
    if request.mcp_servers == []:
        request.mcp_servers = None
    refuse_given(request, _REFUSED)
    return request


class TranslatedCount:
    """One request to `/v1/messages/count_tokens`."""

    def __init__(self, request: CountTokensRequest) -> None:
        chat = input_fields(request)
        told = {name: chat[name] for name in _TOLD if name in chat}
        if request.models is not None:
            told["models"] = request.models
        self.body = msgspec.json.encode(told)

    def answer(self, body: bytes) -> bytes:
        """Return how many tokens there are."""
        count = (read_chunk(body) or {}).get("count")
        if type(count) is not int:
            raise ApiError(
                502,
                "the backend's answer is no count of tokens",
                kind="server_error",
                code="upstream_error",
            )
        return msgspec.json.encode({"input_tokens": count})

    def stream(self) -> None:
        """There are none."""
        return

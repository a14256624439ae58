"""Answers of `/v1/messages`, whole: the message, its blocks, and why it stopped."""

from __future__ import annotations

from typing import Any

import msgspec

from atoll.runtime.gateway.dialects.chat import (
    AnswerBlock,
    AnswerEnding,
    AnswerHead,
    BlockKind,
    TokenCounts,
)
from atoll.runtime.gateway.dialects.messages.request import MessagesRequest

_REASONS = {
    "length": "max_tokens",
    "tool_calls": "tool_use",
    "function_call": "tool_use",
    "content_filter": "refusal",
}


class MessageWriter:
    """Makes the message of one request; its id is made of `seed`."""

    def __init__(self, request: MessagesRequest, seed: str) -> None:
        self._id = f"msg_{seed}"
        self._stops = frozenset(request.stop_sequences or ())
        self._thinks = request.thinking is not None and request.thinking.shown

    def shows(self, block: AnswerBlock) -> bool:
        """Whether the client is to see a block; reasoning only if it asked for thinking."""
        return self._thinks or block.kind != "reasoning"

    def whole(
        self, head: AnswerHead, blocks: list[AnswerBlock], ending: AnswerEnding
    ) -> dict[str, Any]:
        """Return the message of an answer that is all there."""
        content = [content_block(block) for block in blocks if self.shows(block)]
        kinds = {block.kind for block in blocks}
        return (
            self.begun(head, content) | self.stop(ending, kinds) | {"usage": usage(ending.tokens)}
        )

    def begun(self, head: AnswerHead, content: list[dict[str, Any]]) -> dict[str, Any]:
        """Return a message that has not stopped."""
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": head.model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage(TokenCounts()),
        }

    def stop(self, ending: AnswerEnding, kinds: set[BlockKind]) -> dict[str, Any]:
        """Return why an answer with blocks of these kinds stopped."""
        reason = _REASONS.get(ending.reason)
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
    return {"type": "text", "text": "", "citations": None}


def read_input(arguments: str) -> dict[str, Any]:
    """Return the arguments of a call; what is no JSON object is kept as `INVALID_JSON`."""
    if not arguments.strip():
        return {}
    try:
        found = msgspec.json.decode(arguments.encode())
    except (msgspec.DecodeError, RecursionError):
        found = None
    return found if isinstance(found, dict) else {"INVALID_JSON": arguments}

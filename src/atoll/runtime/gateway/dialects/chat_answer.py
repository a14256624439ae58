"""An answer of chat, taken apart: blocks of text, reasoning and calls, why it ended, what it used."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from atoll.runtime.gateway.events import Chunk, choices_of, index_of, read_chunk
from atoll.runtime.gateway.faults import server_fault

BlockKind = Literal["reasoning", "text", "refusal", "call"]
TEXTS: tuple[tuple[str, BlockKind], ...] = (
    ("reasoning_content", "reasoning"),
    ("reasoning", "reasoning"),
    ("content", "text"),
    ("refusal", "refusal"),
)
"""Fields of a message or delta with text, in the order in which they count, and the kinds of their blocks."""

_MAX = 2**53
CUT = frozenset({"length", "content_filter"})
"""Reasons for which an answer ends within its last block."""


@dataclass(slots=True)
class AnswerBlock:
    """A block of an answer: text of a kind, or the arguments of a call."""

    kind: BlockKind
    call_id: str = ""
    name: str = ""
    """Of the tool that is called."""
    parts: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """All text so far."""
        if len(self.parts) > 1:
            self.parts = ["".join(self.parts)]
        return self.parts[0] if self.parts else ""


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """Tokens that an answer used."""

    prompt: int = 0
    completion: int = 0
    cached: int = 0
    """Of the prompt, read from a cache."""
    reasoning: int = 0
    """Of the completion."""


@dataclass(frozen=True, slots=True)
class ChatHead:
    """Parts of an answer known from its first word on."""

    model: str
    created_s: int
    """Unix time."""
    tokens: TokenCounts = TokenCounts()
    """By then; none where its engine says so only at the end."""


@dataclass(frozen=True, slots=True)
class AnswerEnding:
    """How an answer ended."""

    reason: str
    """As chat calls it: stop, length, tool_calls, content_filter."""
    stop: str | None = None
    """The stop sequence that ended it, where the backend says so."""
    tokens: TokenCounts = TokenCounts()


@dataclass(frozen=True, slots=True)
class ChatAnswer:
    """A whole answer."""

    head: ChatHead
    blocks: list[AnswerBlock]
    ending: AnswerEnding


def _count(value: Any) -> int:
    """Return a count, or 0 for what is none; no more than JSON can hold exactly."""
    return value if type(value) is int and 0 < value <= _MAX else 0


def head_of(chunk: Chunk, asked: str) -> ChatHead:
    """Return the head that a chunk or a whole answer has; `asked`: the model that was asked for."""
    model, created = chunk.get("model"), chunk.get("created")
    return ChatHead(
        model if isinstance(model, str) and model else asked,
        _count(int(created) if isinstance(created, float) and created < _MAX else created),
        early_counts(chunk),
    )


def early_counts(chunk: Chunk) -> TokenCounts:
    """Return what one of the first chunks says of the prompt: by a usage, or by naming its tokens."""
    if isinstance(chunk.get("usage"), dict):
        return counts_of(chunk["usage"])
    ids = chunk.get("prompt_token_ids")
    return TokenCounts(len(ids)) if isinstance(ids, list) else TokenCounts()


def counts_of(usage: Any) -> TokenCounts:
    """Return the counts in a `usage`; what is not there is 0."""

    def number(data: Any, key: str) -> int:
        return _count(data.get(key)) if isinstance(data, dict) else 0

    if not isinstance(usage, dict):
        return TokenCounts()
    prompt = number(usage, "prompt_tokens")
    return TokenCounts(
        prompt,
        number(usage, "completion_tokens"),
        min(prompt, number(usage.get("prompt_tokens_details"), "cached_tokens")),
        number(usage.get("completion_tokens_details"), "reasoning_tokens"),
    )


def matched_stop(choice: Chunk) -> str | None:
    """Return the stop sequence that ended a choice: vLLM's name for it, or SGLang's."""
    for key in ("stop_reason", "matched_stop"):
        value = choice.get(key)
        if isinstance(value, str) and value:
            return value
    return None


def read_answer(body: bytes, asked: str, seed: str) -> ChatAnswer:
    """Read a whole chat answer; what is none is an ApiError (502)."""
    data = read_chunk(body) or {}
    choice = next((c for c in choices_of(data) if index_of(c) == 0), None)
    message = None if choice is None else choice.get("message")
    if choice is None or not isinstance(message, dict):
        raise server_fault(502, "the backend's answer is no chat completion", "upstream_error")
    blocks: list[AnswerBlock] = []
    for key, kind in TEXTS:
        text = message.get(key)
        if isinstance(text, str) and text and not (key == "reasoning" and blocks):
            blocks.append(AnswerBlock(kind, parts=[text]))
    calls = message.get("tool_calls")
    for number, call in enumerate(calls if isinstance(calls, list) else ()):
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict):
            blocks.append(_call_block(call, function, call_name(seed, number)))
    reason = choice.get("finish_reason")
    ending = AnswerEnding(
        reason if isinstance(reason, str) else "stop",
        matched_stop(choice),
        counts_of(data.get("usage")),
    )
    return ChatAnswer(head_of(data, asked), blocks, ending)


def call_name(seed: str, number: int) -> str:
    """Return the id of a call to which its engine gave none."""
    return f"call_{seed}{number:02x}"


def _call_block(call: Chunk, function: Chunk, otherwise: str) -> AnswerBlock:
    call_id, name, arguments = call.get("id"), function.get("name"), function.get("arguments")
    return AnswerBlock(
        "call",
        call_id if isinstance(call_id, str) and call_id else otherwise,
        name if isinstance(name, str) else "",
        [arguments] if isinstance(arguments, str) and arguments else [],
    )

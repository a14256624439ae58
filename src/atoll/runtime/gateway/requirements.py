"""Requirements of a request: its key, its policy, the models that may serve it, its conversation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from atoll.routing.affinity import blocks, chain
from atoll.runtime.gateway.served_choices import AssignedTurn, Candidate, session_of
from atoll.runtime.openai import (
    AnyRequest,
    ChatRequest,
    CompletionRequest,
    Generation,
    ImageRequest,
    SpeechRequest,
    TranscriptionRequest,
)
from atoll.runtime.pool.policy import HEADERS, Policy, fallbacks

if TYPE_CHECKING:
    from atoll.runtime.accounts.accounts import Grant

SPECIAL = HEADERS | {b"x-atoll-fallback", b"x-atoll-session"}
"""Headers that make a request special."""


class Requirements:
    """Requirements of a request beyond its model; policies of the key and of the request both hold."""

    __slots__ = ("asked", "candidates", "grant", "keys", "movable", "policies", "turn", "work")

    def __init__(self, model: str, candidates: Sequence[Candidate]) -> None:
        self.asked = model
        """The model asked for."""
        self.candidates = tuple(candidates)
        """The best first."""
        self.grant: Grant | None = None
        self.policies: tuple[Policy, ...] = ()
        """That of the key first."""
        self.keys: list[int] = []
        """By which the conversation is known, the longest beginning first; see `routing.affinity`."""
        self.work = 0.0
        """Tokens it will take at most, 0: not limited."""
        self.movable = False
        """Whether it may go on elsewhere in the middle of its answer."""
        self.turn: AssignedTurn | None = None
        """Whose turn it is, where a choice between models was asked for."""


def policies_of(grant: Grant | None, headers: Mapping[bytes, bytes]) -> tuple[Policy, ...]:
    """Return the policies that a request must meet; a malformed header is an ApiError."""
    request_policy = Policy.from_headers(headers)
    key = None if grant is None else grant.policy
    return tuple(policy for policy in (key, request_policy) if policy is not None)


def candidates_of(
    request: AnyRequest,
    headers: Mapping[bytes, bytes],
    policies: Sequence[Policy],
    known: Callable[[str], Sequence[Candidate]],
    visible: Callable[[str], bool],
) -> list[Candidate]:
    """Return the models that may serve a request, each once, the best first.

    `known` gives the models behind a name. Others than the one asked for only if the client named them and
    no policy is against it.
    """
    by_model: dict[str, Candidate] = {}
    for candidate in known(request.model):
        by_model.setdefault(candidate.model, candidate)
    if all(policy.allow_fallback is not False for policy in policies):
        for name in (*fallbacks(headers), *(request.models or ())):
            if name == request.model or not visible(name):
                continue
            for candidate in known(name):
                model, alias = candidate.model, candidate.alias
                held = by_model.setdefault(model, Candidate(model, "fallback", alias))
                if held.alias and not alias:
                    by_model[model] = held._replace(alias="")
    return list(by_model.values())


def conversation(request: AnyRequest, headers: Mapping[bytes, bytes]) -> list[int]:
    """Return the hashes by which the conversation of a request is known, the longest first."""
    session = session_of(headers)
    if session is not None:
        return [hash((request.model, session))]
    if isinstance(request, ChatRequest):
        parts: list[object] = [
            (m.role, m.content if isinstance(m.content, str) else len(m.content or ()))
            for m in request.messages
        ]
        return chain(request.model, parts)[::-1]
    if isinstance(request, CompletionRequest) and isinstance(request.prompt, str):
        return chain(request.model, blocks(request.prompt))[::-1]
    return []


def limit_of(request: AnyRequest) -> int | None:
    """Return the most tokens that a request may generate, if it says so."""
    if isinstance(request, ChatRequest) and request.max_completion_tokens is not None:
        return request.max_completion_tokens
    if isinstance(request, Generation):
        return request.max_tokens
    return None


def max_tokens_of(request: AnyRequest, body: bytes) -> int | None:
    """Return the most tokens that a request may use, prompt and answer; None if it sets no bound.

    A tokenizer makes no more tokens of a text than it has bytes. What is not text is counted otherwise.
    """
    if isinstance(request, SpeechRequest | ImageRequest | TranscriptionRequest):
        return 0
    if not isinstance(request, Generation):
        return len(body)
    generated = limit_of(request)
    if generated is None:
        return None
    choices, prompts = request.n or 1, 1
    if isinstance(request, CompletionRequest):
        choices = max(choices, request.best_of or 1)
        if isinstance(request.prompt, list) and not isinstance(request.prompt[0], int):
            prompts = len(request.prompt)
    return len(body) + generated * choices * prompts

"""Requests for a choice between models: which of its models answers, and which others may.

A choice is a name that clients ask for, "chat". Behind it are models that backends serve. Each request is
assigned to one of them by the shares of a plan (`routing.shares`); with `sticky`, each conversation is. Where
no backend of that model is well another one answers: one that errs no more if there is any, else the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import msgspec

from atoll.routing.affinity import BLOCK_CHARACTERS
from atoll.routing.shares import ShareDealer
from atoll.runtime.openai import AnyRequest, ApiError, ChatRequest, CompletionRequest
from atoll.runtime.pool.routes import ChoiceRoutes
from atoll.telemetry.metrics import CounterFamily


class Candidate(NamedTuple):
    """A model that may serve a request, and what it is to the one asked for."""

    model: str
    how: str
    """`exact`, `alias` or `fallback`; of a choice between models also `variant`, which errs no more than the
    one whose turn it is, and `worse`."""
    alias: str = ""
    """A name that nodes must give the model themselves: what one node says binds no other."""


# A bound on the series of these metrics.
_MAX_LABELS = 4096
_SESSION_BYTES = 256


class ServedChoice:
    """One choice, and the models its requests were assigned to so far."""

    def __init__(self, name: str, routes: ChoiceRoutes) -> None:
        self.name = name
        self.routes = routes
        self.dealer = ShareDealer(routes.shares)

    def model_of(self, service: str) -> str:
        """Return the model that backends serve under a name; the name where nobody said."""
        return self.routes.models.get(service, service)

    def next_for(self, request: AnyRequest, headers: Mapping[bytes, bytes]) -> str:
        """Return who answers a request; nothing is counted yet."""
        if self.routes.sticky:
            key = conversation_key(request, headers)
            if key is not None:
                # With the name of the choice: a conversation may fall elsewhere in another choice.
                return self.dealer.place(self.name.encode() + b"\0" + key)
        return self.dealer.peek()

    def candidates(self, assigned: str) -> list[Candidate]:
        """Return who may answer, the best first: the one assigned, those that err no more, the others.

        Of the second kind another way to the same model comes first, then who has the largest share and
        with it the most room; of the third who errs least.
        """
        shares, errors = self.dealer.shares, self.routes.errors
        own, model = errors.get(assigned, 0.0), self.model_of(assigned)
        others = [name for name in shares if name != assigned]
        no_worse = [name for name in others if errors.get(name, 0.0) <= own]
        no_worse.sort(key=lambda name: (self.model_of(name) != model, -shares[name], name))
        worse = [name for name in others if errors.get(name, 0.0) > own]
        worse.sort(key=lambda name: (errors.get(name, 0.0), -shares[name], name))
        return [
            Candidate(assigned, "exact"),
            *(Candidate(name, "variant") for name in no_worse),
            *(Candidate(name, "worse") for name in worse),
        ]


class AssignedTurn(NamedTuple):
    """Whose turn it is to answer a request for a choice; counted once the request is let in."""

    choice: ServedChoice
    service: str

    def take(self) -> list[Candidate]:
        """Count it, and return who may answer."""
        self.choice.dealer.take(self.service)
        return self.choice.candidates(self.service)


class ChoiceTable:
    """The choices of a gateway: those of its settings, and over them those that a controller told."""

    def __init__(self) -> None:
        self._set: Mapping[str, ChoiceRoutes] = {}
        self._told: Mapping[str, ChoiceRoutes] = {}
        self.by_name: dict[str, ServedChoice] = {}
        self.requests = CounterFamily(
            "atoll_choice_requests_total",
            "Requests for a choice between models that were sent to a backend, by the model that answered.",
            ("choice", "model"),
            limit=_MAX_LABELS,
        )
        self.stand_ins = CounterFamily(
            "atoll_choice_stand_ins_total",
            "Requests for a choice that another model answered than the one whose turn it was.",
            ("choice", "model", "instead_of"),
            limit=_MAX_LABELS,
        )

    def configure(self, choices: Mapping[str, ChoiceRoutes]) -> None:
        """Take the choices of new settings."""
        self._set = choices
        self._merge()

    def tell(self, choices: Mapping[str, ChoiceRoutes]) -> None:
        """Take what a controller says; it replaces what it said before."""
        self._told = choices
        self._merge()

    def _merge(self) -> None:
        """Keep what was assigned of choices that stay as they are."""
        known = self.by_name
        self.by_name = {
            name: known[name]
            if name in known and known[name].routes == routes
            else ServedChoice(name, routes)
            for name, routes in {**self._set, **self._told}.items()
        }

    @property
    def hidden(self) -> frozenset[str]:
        """Names of a plan's making under which backends serve models of choices: no client need know them."""
        return frozenset(
            name
            for choice in self.by_name.values()
            for name in choice.dealer.shares
            if choice.model_of(name) != name
        )

    def turn(
        self,
        request: AnyRequest,
        headers: Mapping[bytes, bytes],
        aliases: Mapping[str, str] = MappingProxyType({}),
    ) -> AssignedTurn | None:
        """Return whose turn it is where a request asks for a choice; raises where its session is none."""
        name = request.model
        choice = self.by_name.get(name) or self.by_name.get(aliases.get(name, ""))
        return None if choice is None else AssignedTurn(choice, choice.next_for(request, headers))

    def count(self, turn: AssignedTurn, service: str) -> None:
        """Count a request that ended, and who answered it."""
        choice = turn.choice
        model, meant = choice.model_of(service), choice.model_of(turn.service)
        self.requests.child(choice.name, model).add()
        if model != meant:
            self.stand_ins.child(choice.name, model, meant).add()


def session_of(headers: Mapping[bytes, bytes]) -> bytes | None:
    """Return what a client calls its conversation, None if it does not say; raises where that is no name."""
    session = headers.get(b"x-atoll-session")
    if session is not None and not 0 < len(session) <= _SESSION_BYTES:
        raise ApiError(
            400,
            f"x-atoll-session: 1 to {_SESSION_BYTES} bytes are needed",
            param="x-atoll-session",
            code="invalid_header",
        )
    return session


def conversation_key(request: AnyRequest, headers: Mapping[bytes, bytes]) -> bytes | None:
    """Return what a conversation is known by: its session, or how it began; None for what is none.

    Later turns of a conversation begin with the messages up to the first of its user, and so do those of
    everybody else who begins alike: `user` tells them apart where a client gives it.
    """
    session = session_of(headers)
    if session is not None:
        return b"session\0" + session
    if isinstance(request, ChatRequest):
        # All turns of a conversation share what comes up to the first message of its user.
        begin = next((n for n, m in enumerate(request.messages) if m.role == "user"), 0)
        opening: object = request.messages[: begin + 1]
    elif isinstance(request, CompletionRequest) and isinstance(request.prompt, str):
        opening = request.prompt[:BLOCK_CHARACTERS]
    else:
        return None
    return msgspec.json.encode([request.user, opening])

"""Which backend serves a request that is special: by policy, model, conversation and the end of nodes.

A request that no node may serve is told so: 404 for a model that nobody knows, 403 where the key forbids
every node, 503 with the reasons otherwise. It never gets less than it asked for.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from atoll.routing.affinity import Affinity
from atoll.runtime.gateway import faults
from atoll.runtime.gateway.requirements import (
    Requirements,
    candidates_of,
    conversation,
    limit_of,
    policies_of,
)
from atoll.runtime.gateway.served_choices import AssignedTurn, Candidate, ChoiceTable
from atoll.runtime.gateway.settings import GatewaySettings
from atoll.runtime.openai import AnyRequest, ApiError, Generation
from atoll.runtime.pool.member import Allow, Member
from atoll.runtime.pool.pool import BackendPool

if TYPE_CHECKING:
    from atoll.runtime.accounts.accounts import Accounts, Grant
    from atoll.runtime.http.http_server import Request
    from atoll.runtime.pool.routes import RoutesTold

_LATELY_S = 600.0
"""A model that lost its last backend within this is told to be away (503), not unknown (404)."""
_UNKNOWN_S = 30.0
"""Seconds that a request is assumed to need while nobody knows."""
_SURE = 2.0
"""So many times as long as expected a node must live for a request that cannot be moved."""
_OF_CHOICES = frozenset({"exact", "variant", "worse"})
_WHY = {
    "provider": "of a provider that is not trusted",
    "region": "in another region",
    "precision": "below the precision asked for",
    "context": "with too short a context",
    "gpu": "with other GPUs",
    "stability": "not stable enough",
    "node": "not the one asked for",
    "ending": "about to end",
}


class Movable(Protocol):
    """A request that may be moved to another backend."""

    @property
    def begun(self) -> bool:
        """Whether the client has a part of the answer."""
        ...

    def uses(self, member: Member) -> bool:
        """Whether it is at a backend now."""
        ...

    def can_move(self, now_s: float) -> bool:
        """Whether another backend could go on with it."""
        ...

    def member_down(self, reason: str, *, died: bool = True) -> None:
        """Leave a backend that is gone or (not `died`) will be, for another where that is possible."""


class BackendChooser:
    """Chooses backends for special requests of a gateway. Time is a parameter."""

    def __init__(
        self, pool: BackendPool, accounts: Accounts | None, settings: GatewaySettings
    ) -> None:
        self._pool = pool
        self._accounts = accounts
        self._settings = settings
        self._affinity = Affinity()
        self._seen_s: dict[str, float] = {}
        self.refusals: Counter[str] = Counter()
        """Requests that no node might serve, by reason."""
        self.stand_ins: Counter[str] = Counter()
        """Requests served under another name, by how."""
        self.choice_table = ChoiceTable()
        """Names that several models answer to."""

    def configure(self, settings: GatewaySettings) -> None:
        """Choose by new settings from now on."""
        self._settings = settings
        self.choice_table.configure(settings.choices)

    def tell(self, routes: RoutesTold) -> None:
        """Take which models answer to which names, as a controller says it."""
        self.choice_table.tell(routes.choices)

    # What a request requires

    def gather_requirements(
        self,
        request: Request,
        parsed: AnyRequest,
        grant: Grant | None,
        now_s: float,
        turn: AssignedTurn | None = None,
    ) -> Requirements:
        """Return what is special about a request, or raise: no node knows its model.

        `turn` says who answers a request for a choice between models, and counts as taken from here on.
        """
        headers = request.headers
        policies = policies_of(grant, headers)
        accounts = self._accounts

        def visible(model: str) -> bool:
            return accounts is None or grant is None or accounts.visible(grant, model)

        def known(name: str) -> list[Candidate]:
            if turn is not None and name == parsed.model:
                return self._served(turn.choice.candidates(turn.service))
            return self.find_candidates(name)

        candidates = candidates_of(parsed, headers, policies, known, visible)
        if not candidates:
            raise self._explain_unknown(parsed.model, now_s)
        requirements = Requirements(parsed.model, candidates)
        if turn is not None:
            # Not before: a request that nobody can serve takes no turn.
            turn.take()
            requirements.turn = turn
        requirements.grant = grant
        requirements.policies = policies
        if self._settings.affinity:
            requirements.keys = conversation(parsed, headers)
        # How long a request may take matters only where some node knows its end.
        if self._pool.ending:
            limit = limit_of(parsed)
            requirements.work = 0.0 if limit is None else 1.0 + limit
            requirements.movable = isinstance(parsed, Generation) and bool(parsed.stream)
        return requirements

    def _served(self, candidates: Iterable[Candidate]) -> list[Candidate]:
        return [candidate for candidate in candidates if candidate.model in self._pool.rings]

    def find_candidates(self, name: str) -> list[Candidate]:
        """Return the models behind a name, the best first."""
        pool, by_name = self._pool, self.choice_table.by_name
        choice = by_name.get(name) or by_name.get(self._settings.aliases.get(name, ""))
        if choice is not None:
            # Not what was asked for first: nobody's turn.
            return self._served(choice.candidates(choice.dealer.peek()))
        # The model of that name itself comes before what the name stands for.
        candidates = [Candidate(name, "exact")] if name in pool.rings else []
        other = self._settings.aliases.get(name)
        if other is not None and other in pool.rings:
            candidates.append(Candidate(other, "alias"))
        aliased = pool.aliases.get(name, ())
        candidates += [Candidate(m, "alias", name) for m in aliased if m in pool.rings]
        return candidates

    def tables(self) -> tuple[Mapping[str, object], ...]:
        """Return what `find_candidates` looks at beside the rings; other objects where it changed."""
        return self.choice_table.by_name, self._settings.aliases, self._pool.aliases

    def find_alias(self, name: str) -> str | None:
        """Return the model behind another name, None if it is none."""
        return next((c.model for c in self.find_candidates(name) if c.how == "alias"), None)

    def names(self, *, hidden: bool = False) -> list[str]:
        """Return every name to ask for, choices and models first.

        Names that a plan made for the models of choices are left out unless `hidden`, though they answer too.
        """
        pool = self._pool
        served = [
            name
            for name, choice in self.choice_table.by_name.items()
            if any(service in pool.rings for service in choice.dealer.shares)
        ]
        asked = self._settings.aliases.items()
        known = [alias for alias, model in asked if model in pool.rings or model in served]
        names = dict.fromkeys([*pool.rings, *known, *pool.aliases])
        behind = frozenset() if hidden else self.choice_table.hidden
        shown = [name for name in names if name not in behind]
        return list(dict.fromkeys([*served, *shown]))

    def _explain_unknown(self, model: str, now_s: float) -> ApiError:
        seen_s = self._seen_s.get(model)
        if seen_s is not None and now_s - seen_s < _LATELY_S:
            self.refusals["gone"] += 1
            return faults.gone(model)
        return faults.unknown_model(model)

    def note_loss(self, models: Sequence[str], now_s: float) -> None:
        """Remember models that lost a backend: that one is known and not served is no 404."""
        for model in models:
            self._seen_s[model] = now_s
        for model in [m for m, s in self._seen_s.items() if now_s - s > _LATELY_S]:
            del self._seen_s[model]

    # Who serves it

    def choose(
        self,
        requirements: Requirements,
        avoid: frozenset[str],
        now_s: float,
        *,
        squeeze: bool,
        only: str | None = None,
    ) -> tuple[Member | None, str]:
        """Return the backend for a request and the model to ask it for, of which `only` one may be left."""
        keys = requirements.keys
        # Once a backend failed the request, its conversation is free to go elsewhere.
        prefer = self._affinity.find(keys) if keys and not avoid else None
        for (model, how, alias), well, tight in self._tries(requirements, avoid, only, squeeze):
            allow = self._allow(requirements, model, alias)
            member = self._pool.pick(
                model,
                avoid,
                squeeze=tight,
                allow=_only_well(allow) if well else allow,
                prefer=prefer,
                now_s=now_s,
            )
            if member is None:
                continue
            if how != "exact":
                self.stand_ins[how] += 1
            if keys:
                self._affinity.note(keys[0], member.name)
            return member, model
        return None, ""

    def _tries(
        self,
        requirements: Requirements,
        avoid: frozenset[str],
        only: str | None,
        squeeze: bool,
    ) -> Iterator[tuple[Candidate, bool, bool]]:
        """Yield whom to try in which order, whether backends must be well, and whether to squeeze.

        Of a choice, backends of any model that errs no more than the one whose turn it is come before one
        that is ejected or that failed the request. Models that err more come where none of those is left;
        that they are busy is no reason.
        """
        turn = requirements.turn
        if turn is None:
            for candidate in requirements.candidates:
                if only is None or candidate.model == only:
                    yield candidate, False, squeeze
            return
        model_of = turn.choice.model_of
        wanted = [
            c
            for c in requirements.candidates
            if only is None or model_of(c.model) == model_of(only)
        ]
        good = [c for c in wanted if c.how in ("exact", "variant")]
        worse = [c for c in wanted if c.how == "worse"]
        # 1. Models that err no more than the one whose turn it is, at backends that are well.
        yield from ((c, True, False) for c in good)
        # 2. Models that err more, only where no such backend is left, busy or not.
        if worse and not any(self._has_well(requirements, c, avoid) for c in good):
            yield from ((c, True, False) for c in worse)
        # 3. The good ones again, now with backends that are ejected, or (squeezed) that failed it.
        yield from ((c, False, squeeze) for c in good)
        # 4. The worse ones likewise, where no good one is up at all.
        if not any(self._has_up(c) for c in good):
            yield from ((c, False, squeeze) for c in worse)
        # 5. What is no part of the choice.
        yield from ((c, False, squeeze) for c in wanted if c.how not in _OF_CHOICES)

    def _has_well(
        self, requirements: Requirements, candidate: Candidate, avoid: frozenset[str]
    ) -> bool:
        """Whether a model has a backend that is well and has not failed the request, busy or not."""
        ring = self._pool.rings.get(candidate.model)
        allow = _only_well(self._allow(requirements, candidate.model, candidate.alias))
        members = () if ring is None else ring.members
        return any(m.up and m.name not in avoid and allow(m) for m in members)

    def _has_up(self, candidate: Candidate) -> bool:
        ring = self._pool.rings.get(candidate.model)
        return ring is not None and any(member.up for member in ring.members)

    def allow(self, requirements: Requirements, model: str) -> Allow | None:
        """Return whether a backend may see a request for a model; None: all may."""
        return self._allow(requirements, model, "")

    def _allow(self, requirements: Requirements, model: str, alias: str) -> Allow | None:
        policies, ending = requirements.policies, self._pool.ending
        # Nobody is to be left out: the pool need not ask.
        if not policies and not ending and not alias:
            return None

        def fits(member: Member) -> bool:
            if alias and member.backend.aliases.get(alias) != model:
                return False
            if policies:
                offer = member.offer(model)
                for policy in policies:
                    if policy.refusal(offer) is not None:
                        return False
            return True

        if not ending:
            return fits
        work = self._work_to_last(requirements, model, fits)
        return lambda member: fits(member) and self._lasts(member, model, work)

    def _work_to_last(self, requirements: Requirements, model: str, fits: Allow) -> float:
        """Return for how much work a node must be there to get a request: as much as anybody lasts for.

        First all that the request may take, so that nodes without an end get what is long; then as much as
        the longest answers of the model took lately; a stream, which can be moved, is begun where an answer
        of the usual length would end. What would be begun anew gets twice the time, since times are guessed.
        Who is only busy is waited for.
        """
        ring = self._pool.rings.get(model)
        if ring is None:
            return 0.0
        most = requirements.work or ring.long_work
        works = [most, min(most, ring.long_work or most)]
        if requirements.movable:
            works.append(min(most, ring.mean_work or most))
        else:
            works = [_SURE * work for work in works]
        up = [member for member in ring.members if member.up and fits(member)]
        for work in works:
            if any(self._lasts(member, model, work) for member in up):
                return work
        return works[-1]

    def _lasts(self, member: Member, model: str, work: float) -> bool:
        """Whether a node is expected to be there until so much work is done; 0: nobody knows how much."""
        if member.ends_s is None:
            return True
        # Less the time before its end at which requests are moved away.
        left_s = member.ends_s - time.time() - self._settings.handover_s
        ring = self._pool.rings.get(model)
        if left_s <= 0.0 or ring is None:
            return False
        expected_s = ring.expected_s(member, work) if work else None
        return (_UNKNOWN_S if expected_s is None else expected_s) <= left_s

    # When nobody does

    def explain_none(self, requirements: Requirements, now_s: float) -> tuple[ApiError, float]:
        """Return why no backend serves a request, and how long (s) one may be waited for."""
        why: Counter[str] = Counter()
        by_key = nodes = 0
        waits = False
        for model, _, alias in requirements.candidates:
            ring = self._pool.rings.get(model)
            lasts = self._allow(requirements, model, alias) if self._pool.ending else None
            for member in () if ring is None else ring.members:
                if alias and member.backend.aliases.get(alias) != model:
                    continue
                nodes += 1
                offer = member.offer(model)
                reasons = [policy.refusal(offer) for policy in requirements.policies]
                refusal = next((reason for reason in reasons if reason is not None), None)
                if refusal is None and lasts is not None and not lasts(member):
                    refusal = "ending"
                if refusal is not None:
                    why[refusal] += 1
                    key = None if requirements.grant is None else requirements.grant.policy
                    by_key += key is not None and key.refusal(offer) is not None
                elif member.masked:
                    # It may be back in a moment: worth waiting for.
                    waits = True
        refused = sum(why.values())
        queue_s = self._settings.queue_s
        if nodes and refused < nodes:
            # Full, down, or away for a moment.
            retry_s = self._settings.deadlines.retry_s if waits else 0.0
            return faults.busy(requirements.asked), max(queue_s, retry_s)
        if not nodes:
            return self._explain_unknown(requirements.asked, now_s), 0.0
        # A request counts once for a reason, however many nodes share it.
        self.refusals.update(dict.fromkeys(why, 1))
        listed = ", ".join(f"{count} {_WHY[reason]}" for reason, count in why.most_common())
        # The policy of the key alone forbids every node.
        if by_key == nodes:
            return faults.forbidden(requirements.asked, listed), 0.0
        if "ending" in why:
            return faults.ending(requirements.asked, listed), 0.0
        trusted = set(why) == {"provider"}
        return faults.not_allowed(requirements.asked, listed, trusted=trusted), 0.0

    def hand_over(self, relays: Iterable[Movable], now_s: float) -> None:
        """Move what runs on nodes that are about to end, where there is another to go to."""
        soon_s = time.time() + self._settings.handover_s
        for member in list(self._pool.members.values()):
            if member.ends_s is None or member.ends_s > soon_s or not member.inflight:
                continue
            # A copy: what is moved may end, and leave the set.
            for relay in [r for r in relays if r.uses(member)]:
                if relay.can_move(now_s):
                    relay.member_down("the node is about to end", died=False)

    def vacate(self, member: Member, relays: Iterable[Movable], now_s: float) -> None:
        """Move streams from a backend that is drained, where another can go on; the rest ends there."""
        for relay in [r for r in relays if r.begun and r.uses(member)]:
            if relay.can_move(now_s):
                relay.member_down("the machine is drained", died=False)

    def headers(self, requirements: Requirements, member: Member, model: str) -> bytes:
        """Return headers that say who serves a request, and what its key has left."""
        offer = member.offer(model)
        turn = requirements.turn
        named = model if turn is None else turn.choice.model_of(model)
        lines = [
            b"x-atoll-model: %b\r\n" % _safe(named),
            b"x-atoll-node: %b\r\n" % _safe(offer.node),
            b"x-atoll-sid: %b\r\n" % _safe(offer.sid),
        ]
        for name, value in (
            (b"provider", offer.provider),
            (b"region", offer.region),
            (b"engine", offer.engine),
            (b"precision", offer.precision),
        ):
            if value:
                lines.append(b"x-atoll-%b: %b\r\n" % (name, _safe(value)))
        if offer.provider and not offer.verified:
            lines.append(b"x-atoll-provider-verified: no\r\n")
        accounts = self._accounts
        if accounts is not None and requirements.grant is not None:
            lines += [b"%b: %b\r\n" % pair for pair in accounts.limit_headers(requirements.grant)]
        return b"".join(lines)


def _only_well(allow: Allow | None) -> Allow:
    """Return the same question of backends that are not ejected."""

    def well(member: Member) -> bool:
        return member.outlier.ejected_until_s is None and (allow is None or allow(member))

    return well


def _safe(text: str) -> bytes:
    """Return what others said of themselves as the value of a header: one line of printable ASCII."""
    kept = "".join(c if c.isascii() and c.isprintable() else "?" for c in text[:256])
    return kept.encode()

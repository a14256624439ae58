"""Which backend serves a request that is special: by policy, model, conversation and the end of nodes.

A request that no node may serve is told so: 404 for a model that nobody knows, 403 where the key forbids
every node, 503 with the reasons otherwise. It never gets less than it asked for.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from atoll.routing.affinity import Affinity
from atoll.runtime.gateway import faults
from atoll.runtime.gateway.requirements import (
    Candidate,
    Requirements,
    candidates_of,
    conversation,
    limit_of,
    policies_of,
)
from atoll.runtime.openai import AnyRequest, ApiError
from atoll.runtime.pool.pool import Allow, BackendPool, Member

if TYPE_CHECKING:
    from atoll.runtime.accounts.accounts import Grant
    from atoll.runtime.gateway.app import Gateway
    from atoll.runtime.gateway.attempt import Attempts
    from atoll.runtime.http.server import Request

_LATELY_S = 600.0
_UNKNOWN_S = 30.0
"""What a request is taken to need while nobody knows."""
_BYTES_A_TOKEN = 4
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


class BackendChooser:
    """Chooses backends for special requests of a gateway."""

    def __init__(self, app: Gateway) -> None:
        self._app = app
        self._pool: BackendPool = app.pool
        self._affinity = Affinity()
        self._seen_s: dict[str, float] = {}
        self.refusals: Counter[str] = Counter()
        """Requests that no node might serve, by reason."""
        self.stand_ins: Counter[str] = Counter()
        """Requests served under another name, by how."""

    # What a request wishes

    def wish(self, request: Request, parsed: AnyRequest, grant: Grant | None) -> Requirements:
        """Return what is special about a request, or raise: no node knows its model."""
        app = self._app
        headers = request.headers
        policies = policies_of(grant, headers)
        accounts = app.accounts

        def visible(model: str) -> bool:
            return accounts is None or grant is None or accounts.visible(grant, model)

        found = candidates_of(parsed, headers, policies, self._known, visible)
        if not found:
            raise self._unknown(parsed.model)
        wish = Requirements(parsed.model, found)
        wish.grant = grant
        wish.policies = policies
        if app.settings.affinity:
            wish.keys = conversation(parsed, headers)
        if self._pool.ending:
            most = limit_of(parsed)
            wish.work = 0.0 if most is None else 1.0 + most
        return wish

    def _known(self, name: str) -> list[Candidate]:
        pool = self._pool
        found = [Candidate(name, "exact")] if name in pool.rings else []
        other = self._app.settings.aliases.get(name)
        if other is not None and other in pool.rings:
            found.append(Candidate(other, "alias"))
        given = pool.aliases.get(name, ())
        found += [Candidate(m, "alias", name) for m in given if m in pool.rings]
        return found

    def names(self) -> list[str]:
        """Return every name that can be asked for, models first."""
        pool = self._pool
        known = [a for a, m in self._app.settings.aliases.items() if m in pool.rings]
        return list(dict.fromkeys([*pool.rings, *known, *pool.aliases]))

    def _unknown(self, model: str) -> ApiError:
        seen_s = self._seen_s.get(model)
        if seen_s is not None and self._app.loop.time() - seen_s < _LATELY_S:
            self.refusals["gone"] += 1
            return faults.gone(model)
        return faults.unknown_model(model)

    def gone(self, models: Sequence[str]) -> None:
        """Remember models that lost a backend: that one is known and not served is no 404."""
        now_s = self._app.loop.time()
        for model in models:
            self._seen_s[model] = now_s
        for model in [m for m, s in self._seen_s.items() if now_s - s > _LATELY_S]:
            del self._seen_s[model]

    # Who serves it

    def choose(
        self,
        relay: Attempts,
        wish: Requirements,
        avoid: frozenset[str],
        now_s: float,
        *,
        squeeze: bool,
    ) -> Member | None:
        """Return the backend for a request, and have it ask for the right model there."""
        candidates: Sequence[Candidate] = wish.candidates
        if relay.begun:
            # What began as one model does not go on as another.
            candidates = [c for c in wish.candidates if c.model == relay.model]
        prefer = self._affinity.find(wish.keys) if wish.keys and not avoid else None
        for model, how, alias in candidates:
            member = self._pool.pick(
                model,
                avoid,
                squeeze=squeeze,
                allow=self._allow(wish, model, alias),
                prefer=prefer,
                now_s=now_s,
            )
            if member is None:
                continue
            relay.serve_as(model)
            if how != "exact":
                self.stand_ins[how] += 1
            if wish.keys:
                self._affinity.note(wish.keys[0], member.name)
            return member
        return None

    def _allow(self, wish: Requirements, model: str, alias: str) -> Allow | None:
        policies, ending = wish.policies, self._pool.ending
        if not policies and not ending and not alias:
            return None

        def allow(member: Member) -> bool:
            if alias and member.backend.aliases.get(alias) != model:
                return False
            if policies:
                offer = member.offer(model)
                for policy in policies:
                    if policy.refusal(offer) is not None:
                        return False
            return member.ends_s is None or self._lasts(member, model, wish)

        return allow

    def _lasts(self, member: Member, model: str, wish: Requirements) -> bool:
        """Whether a node is expected to be there until a request ends."""
        if member.ends_s is None:
            return True
        left_s = member.ends_s - time.time() - self._app.settings.handover_s
        ring = self._pool.rings.get(model)
        if left_s <= 0.0 or ring is None:
            return False
        usual = ring.mean_work
        # Few answers are as long as they may be.
        work = min(wish.work or float("inf"), 2.0 * usual) if usual else wish.work
        expected_s = ring.expected_s(member, work) if work else None
        return (_UNKNOWN_S if expected_s is None else expected_s) <= left_s

    # When nobody does

    def nobody(self, wish: Requirements) -> tuple[ApiError, float]:
        """Return why no backend serves a request, and how long (s) one may be waited for."""
        why: Counter[str] = Counter()
        by_key = nodes = 0
        waits = False
        for model, _, alias in wish.candidates:
            ring = self._pool.rings.get(model)
            for member in () if ring is None else ring.members:
                if alias and member.backend.aliases.get(alias) != model:
                    continue
                nodes += 1
                offer = member.offer(model)
                reasons = [policy.refusal(offer) for policy in wish.policies]
                refusal = next((reason for reason in reasons if reason is not None), None)
                if refusal is None and not self._lasts(member, model, wish):
                    refusal = "ending"
                if refusal is not None:
                    why[refusal] += 1
                    key = None if wish.grant is None else wish.grant.policy
                    by_key += key is not None and key.refusal(offer) is not None
                elif member.masked:
                    waits = True
        refused = sum(why.values())
        queue_s = self._app.settings.queue_s
        if nodes and refused < nodes:
            # Full, down, or away for a moment.
            retry_s = self._app.deadlines.retry_s if waits else 0.0
            return faults.busy(wish.asked), max(queue_s, retry_s)
        if not nodes:
            return self._unknown(wish.asked), 0.0
        self.refusals.update(dict.fromkeys(why, 1))
        listed = ", ".join(f"{count} {_WHY[reason]}" for reason, count in why.most_common())
        if by_key == nodes:
            return faults.forbidden(wish.asked, listed), 0.0
        trusted = set(why) == {"provider"}
        return faults.not_allowed(wish.asked, listed, trusted=trusted), 0.0

    def hand_over(self, now_s: float) -> None:
        """Move what runs on nodes that are about to end, where there is another to go to."""
        soon_s = time.time() + self._app.settings.handover_s
        for member in list(self._pool.members.values()):
            if member.ends_s is None or member.ends_s > soon_s or not member.inflight:
                continue
            for relay in [r for r in self._app.relays if r.uses(member)]:
                if relay.can_move(now_s):
                    relay.member_down("the node is about to end")

    def heads(self, wish: Requirements, member: Member, model: str) -> bytes:
        """Return headers that say who serves a request, and what its key has left."""
        offer = member.offer(model)
        found = [
            b"x-atoll-model: %b\r\n" % _safe(model),
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
                found.append(b"x-atoll-%b: %b\r\n" % (name, _safe(value)))
        if offer.provider and not offer.verified:
            found.append(b"x-atoll-provider-verified: no\r\n")
        accounts = self._app.accounts
        if accounts is not None and wish.grant is not None:
            found += [b"%b: %b\r\n" % pair for pair in accounts.limit_headers(wish.grant)]
        return b"".join(found)


def _safe(text: str) -> bytes:
    """Return what others said of themselves as the value of a header: one line of printable ASCII."""
    kept = "".join(c if c.isascii() and c.isprintable() else "?" for c in text[:256])
    return kept.encode()

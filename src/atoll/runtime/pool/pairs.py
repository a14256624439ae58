"""The backends of a model some of which run prefill alone, and which pair gets the next request.

A pair is chosen as in the simulator: by `routing.instances.InstanceRouter` over the ways of a plan, around
what is dead or busy. Requests go to the backend that answers, which decodes or runs both phases; the one
that computes the prompt before that is its `partner`. Where no prefill backend is left, those that decode
compute prompts by themselves, if they can.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from atoll.plan.plan import Route
from atoll.routing import decisions
from atoll.routing.instances import InstanceRouter, route_tables
from atoll.runtime.pool.member import Member
from atoll.runtime.pool.rings import ALWAYS_RUNNING, Ring, Usable, max_share

PairShares = Mapping[tuple[str, str], float]
"""Shares of requests by the instances that compute their prompts and decode them."""
_Edges = dict[tuple[str, str], float]


class PairRing(Ring):
    """A ring of backends that answer, with those that compute prompts for them."""

    def __init__(
        self,
        members: list[Member],
        prefills: list[Member],
        before: Ring | None,
        seed: int,
        told: list[float] | None = None,
        pairs: PairShares | None = None,
    ) -> None:
        """Begin as `Ring` does; `told` are weights of `members`, then of `prefills`."""
        own = None if told is None else told[: len(members)]
        super().__init__(members, before, seed, own)
        # Whoever is the only one to answer still has partners to choose from.
        self.only = None
        self.prefills = prefills
        given = [m.backend.weight for m in prefills] if told is None else told[len(members) :]
        self._weights = dict(zip((m.name for m in prefills), given, strict=True))
        self._weights |= {m.name: w for m, w in zip(members, self.weight, strict=True)}
        self._by_name = {m.name: m for m in (*members, *prefills)}
        self._lost: frozenset[str] = frozenset()
        self._router = self._make_router(pairs or {}, seed)
        if isinstance(before, PairRing) and before._router is not None and self._router is not None:
            self._router.take_credit(before._router)

    def _make_router(self, pairs: PairShares, seed: int) -> InstanceRouter | None:
        """Return who chooses ways; None where no prefill backend has anybody to hand KV cache to."""
        ways: dict[tuple[str, ...], float] = {
            (m.name,): self._weights[m.name] for m in self.members if m.phase != "decode"
        }
        for first in self.prefills:
            takers = [m for m in self.members if takes_from(m, first)]
            told = {m.name: pairs.get((first.instance, m.instance), 0.0) for m in takers}
            if not any(told.values()):
                # Nobody told of it, or of whom it may hand over to: by what these weigh.
                told = {m.name: self._weights[m.name] or 1e-9 for m in takers}
            scale = self._weights[first.name] / (sum(told.values()) or 1.0)
            ways |= {(first.name, name): share * scale for name, share in told.items()}
        ways = {way: share for way, share in ways.items() if share > 0.0}
        if not any(len(way) > 1 for way in ways):
            return None
        # Only those that hand over alike stand near each other.
        region = {
            m.name: f"{m.backend.metadata.get('region', '')} {m.handover}"
            for m in self._by_name.values()
        }
        routes = [
            Route.model_construct(service="", instances=way, share=share)
            for way, share in ways.items()
        ]
        return InstanceRouter(route_tables(routes, region), seed=seed)

    def learn(self, usable: Usable, prefer: str | None, now_s: float) -> tuple[Member | None, str]:
        """Return the member for the next request: pairs go by the plan's ways."""
        del now_s
        return self.pick(decisions.ROUND_ROBIN, usable, prefer)

    def pick(self, policy: int, usable: Usable, prefer: str | None) -> tuple[Member | None, str]:
        """Return the member for the next request, its `partner` set, and why it."""
        self.partner = None
        shut = [m.name for m in self._by_name.values() if not usable(m)]
        # A conversation stays where it was decoded: what is cached there need not be handed over.
        chosen, why = None, "weights"
        if prefer is not None and prefer in self._by_name and prefer not in shut:
            others = [m.name for m in self.members if m.name != prefer]
            chosen, why = self._route([*shut, *others]), "affinity"
        if chosen is None:
            chosen, why = self._route([*shut, *self._piled(usable)]) or self._route(shut), "weights"
        if chosen is None:
            # Nobody computes prompts for others now.
            return super().pick(policy, lambda m: usable(m) and m.recomputes, prefer)
        *first, last = chosen
        self.partner = self._by_name[first[0]] if first else None
        return self._by_name[last], why

    def replace_partner(self, member: Member, usable: Usable) -> Member | None:
        """Return another backend that may compute a prompt for one that will decode it."""
        others = [m for m in self.prefills if usable(m) and takes_from(member, m)]
        return min(others, key=lambda m: m.inflight / (self._weights[m.name] or 1e-9), default=None)

    def _piled(self, usable: Usable) -> list[str]:
        """Return those with more than their share of what runs, as `Ring.pick` leaves them out."""
        piled: list[str] = []
        for group in (self.members, self.prefills):
            open_ = [m for m in group if usable(m)]
            running = 1 + sum(m.inflight for m in open_)
            share = max_share(running, sum(self._weights[m.name] for m in open_) or 1.0)
            piled += [
                m.name
                for m in open_
                if m.inflight > max(ALWAYS_RUNNING, share * self._weights[m.name])
            ]
        return piled

    def _route(self, busy: Sequence[str]) -> tuple[str, ...] | None:
        """Return the names of a way around those that are busy."""
        router = self._router
        if router is None:
            return None
        known = router.planned.names[1:-1]
        lost = frozenset(name for name in known if not self._by_name[name].up)
        if lost != self._lost:
            router.back(self._lost - lost)
            router.lost(lost)
            self._lost = lost
        return router.route(name for name in busy if name in known)


def takes_from(decode: Member, prefill: Member) -> bool:
    """Return whether KV cache goes from one backend to another."""
    return decode.phase == "decode" and decode.handover == prefill.handover

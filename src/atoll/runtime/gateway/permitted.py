"""Which models a key may see: those that some node serves which its policy permits.

Worked out once for a policy and kept until backends, aliases or choices change, which is seen by the tables
themselves: each change makes them anew.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from atoll.runtime.gateway.candidates import Candidate
from atoll.runtime.pool.member import Member
from atoll.runtime.pool.policy import Policy
from atoll.runtime.pool.pool import BackendPool

_POLICIES = 256
"""Whose models are kept; more begin anew."""


class FindsCandidates(Protocol):
    """Whoever knows the models behind a name."""

    def find_candidates(self, name: str) -> Sequence[Candidate]:
        """Return the models that serve a name, the best first."""
        ...

    def tables(self) -> tuple[Mapping[str, object], ...]:
        """Return what `find_candidates` looks at beside the pool; another object where it changed."""
        ...


class PermittedModels:
    """The names that may be asked for under a policy."""

    def __init__(self, pool: BackendPool, finder: FindsCandidates) -> None:
        self._pool = pool
        self._finder = finder
        self._seen: tuple[object, ...] = ()
        """The tables that the answers below are about; held, so that no other takes their place."""
        self._known: dict[Policy, dict[str, bool]] = {}

    def choose(self, policy: Policy | None, names: Iterable[str]) -> list[str]:
        """Return those names, in their order, that a node permitted by a policy serves."""
        if policy is None:
            return list(names)
        now = (self._pool.rings, *self._finder.tables())
        if len(now) != len(self._seen) or any(
            a is not b for a, b in zip(now, self._seen, strict=True)
        ):
            self._seen = now
            self._known.clear()
        elif len(self._known) >= _POLICIES and policy not in self._known:
            self._known.clear()
        known = self._known.setdefault(policy, {})
        return [name for name in names if self._permits(policy, name, known)]

    def _permits(self, policy: Policy, name: str, known: dict[str, bool]) -> bool:
        answer = known.get(name)
        if answer is None:
            answer = known[name] = any(
                policy.refusal(member.offer(candidate.model)) is None
                for candidate in self._finder.find_candidates(name)
                for member in self._members(candidate)
            )
        return answer

    def _members(self, candidate: Candidate) -> list[Member]:
        model, alias = candidate.model, candidate.alias
        ring = self._pool.rings.get(model)
        members = [] if ring is None else ring.members
        return [m for m in members if not alias or m.backend.aliases.get(alias) == model]

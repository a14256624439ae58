"""The backends of one model or service, and which of them gets the next request."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from atoll.core.rng import stream
from atoll.routing import decisions
from atoll.routing.learned import Learned, Speed
from atoll.runtime.pool.member import Allow, Member

ALWAYS_RUNNING = 4
"""So few requests are not too many for any backend, whatever its share."""
# With more than so many times its share a backend gets nothing new: it may have grown slow.
_MAX_OF_SHARE = 1.5
_KNOWN = 4
"""Requests after which a speed is worth comparing."""
_WORTH_IT = 2.0
"""A backend that served a conversation before may be so many times slower than the best one now."""

Usable = Callable[[Member], bool]


def max_share(running: float, total: float) -> float:
    """Return how many of so many running requests one may have for each unit of a total weight."""
    return _MAX_OF_SHARE * running / total


def usable_by(avoid: Collection[str], allow: Allow | None, *, ejected: bool, full: bool) -> Usable:
    """Return the question whether a backend can be used; `ejected` and slow, or `full` ones if so told."""

    def usable(m: Member) -> bool:
        return (
            m.up
            and (ejected or not (m.slow or m.outlier.ejected_until_s is not None))
            and (full or not m.full())
            and m.name not in avoid
            and (allow is None or allow(m))
        )

    return usable


class Ring:
    """The backends of one model with the state of the policy: source -> backends, as `decisions` has it.

    Plain lists instead of arrays: outside compiled code they are several times faster to index.
    """

    def __init__(
        self,
        members: list[Member],
        before: Ring | None,
        seed: int,
        told: list[float] | None = None,
    ) -> None:
        """Begin with what a ring `before` had learned; weights that were `told` count before their own."""
        count = len(members)
        self.members = members
        self.only = members[0] if count == 1 else None
        weights = [m.backend.weight for m in members] if told is None else told
        # Weight 0 means last resort; all 0 means all alike.
        self.weight = weights if any(weights) else [1.0] * count
        self.spare = [m for m, w in zip(members, self.weight, strict=True) if w == 0.0]
        self.told = told is not None
        """Whether a controller gave the weights."""
        # Node 0 is the gateway, with an edge to every backend; those lead nowhere.
        self.first = [0, count, *([count] * (count + 1))]
        self.target = list(range(1, count + 1))
        self.order = list(range(count))
        # Credit and speeds outlive a change of the members, so that shares stay smooth.
        credit = before.credits() if before is not None else {}
        self.credit = [credit.get(m.name, 0.0) for m in members]
        # Two seeds within the range of both moduli of the generator in `decisions`.
        self.random = stream(seed, "gateway").integers(1, 2147483398, size=2).tolist()
        self.weighted = self.told or all(m.backend.weighted for m in members)
        known = before.speeds_by_member() if before is not None else {}
        self.speeds = [known.get(m) or Speed() for m in members]
        self.learned: Learned = before.learned if before is not None else Learned()
        self.partner: Member | None = None
        """Who computes the prompt for the member that was picked last, if another does (`pairs`)."""
        self.mean_work: float = before.mean_work if before is not None else 0.0
        """Of a request, as `BackendPool.learn` was told; 0: not known."""
        self.long_work: float = before.long_work if before is not None else 0.0
        """Of the longest requests lately."""

    def speeds_by_member(self) -> dict[Member, Speed]:
        """Return what is known of the speed of each."""
        return dict(zip(self.members, self.speeds, strict=True))

    def weight_of(self, member: Member) -> float:
        """Return the weight of a member, 0 if it is none."""
        pairs = zip(self.members, self.weight, strict=True)
        return next((weight for m, weight in pairs if m is member), 0.0)

    def speed_of(self, member: Member) -> Speed | None:
        """Return what is known of a member's speed, if it is one."""
        for m, speed in zip(self.members, self.speeds, strict=True):
            if m is member:
                return speed
        return None

    def expected_s(self, member: Member, work: float) -> float | None:
        """Return how long a request of so much work would take at a member; None: nobody knows."""
        speed = self.speed_of(member)
        if speed is None or not speed.seen:
            known = [s for s in self.speeds if s.seen]
            if not known:
                return None
            # Like the slowest there is: a guess should not be too bold.
            speed = max(known, key=lambda s: s.alone_s)
        return work * speed.time_s(member.inflight + member.elsewhere)

    def learn(self, usable: Usable, prefer: str | None, now_s: float) -> tuple[Member | None, str]:
        """Return the member for the next request by learned speed, and why it."""
        members, speeds = self.members, self.speeds
        closed = [not usable(m) for m in members]
        running = [float(m.inflight + m.elsewhere) for m in members]
        best, tried = self.learned.pick(speeds, running, closed, now_s)
        if best < 0:
            return None, ""
        if prefer is not None:
            for i, m in enumerate(members):
                if m.name == prefer and not closed[i] and self._worth_it(i, best, running):
                    speeds[i].asked_s = now_s
                    return m, "affinity"
        return members[best], "explored" if tried else "learned"

    def _worth_it(self, home: int, best: int, running: list[float]) -> bool:
        """Whether the member that served a conversation is not too slow now to serve it again."""
        home_speed, best_speed = self.speeds[home], self.speeds[best]
        if home == best or min(home_speed.seen, best_speed.seen) < _KNOWN:
            # Too little is known to compare speeds: what runs is compared.
            return running[home] <= running[best] + ALWAYS_RUNNING
        return home_speed.time_s(running[home]) <= _WORTH_IT * best_speed.time_s(running[best])

    def credits(self) -> dict[str, float]:
        """Return the credit of each, by name."""
        return {m.name: c for m, c in zip(self.members, self.credit, strict=True)}

    def pick(self, policy: int, usable: Usable, prefer: str | None) -> tuple[Member | None, str]:
        """Return the member for the next request by a policy over weights, and why it."""
        members = self.members
        open_ = [usable(m) for m in members]
        running = total = 0.0
        for m, weight, is_open in zip(members, self.weight, open_, strict=True):
            if is_open:
                running += m.inflight
                total += weight
        if total <= 0.0:
            # Nobody with a weight is open: this is what those of weight 0 are for.
            return next((m for m in self.spare if usable(m)), None), "weights"
        # The request itself counts as running.
        share = max_share(running + 1, total)
        # Node 0 is the gateway itself.
        closed = [False]
        for m, weight, is_open in zip(members, self.weight, open_, strict=True):
            # Somebody with a weight is open, and not all of them have more than their share.
            last_resort = weight <= 0.0
            shut = not is_open or last_resort or m.inflight > max(ALWAYS_RUNNING, share * weight)
            if not shut and m.name == prefer:
                return m, "affinity"
            closed.append(shut)
        edge = self._edge(policy, closed)
        return (members[edge] if edge >= 0 else None), "weights"

    def _edge(self, policy: int, closed: Any) -> int:
        # Any: lists stand in for arrays.
        first: Any = self.first
        target: Any = self.target
        weight: Any = self.weight
        order: Any = self.order
        credit: Any = self.credit
        if policy == decisions.ROUND_ROBIN:
            return decisions.round_robin(first, target, weight, order, credit, 0, closed)
        queue: Any = [0.0, *(float(m.inflight) for m in self.members)]
        load: Any = [0.0] + [
            m.inflight / w if w > 0 else 0.0 for m, w in zip(self.members, self.weight, strict=True)
        ]
        delay: Any = [m.mean_s for m in self.members]
        random: Any = self.random
        return decisions.next_hop(
            policy, first, target, weight, order, credit, delay, queue, load, random, 0, closed
        )

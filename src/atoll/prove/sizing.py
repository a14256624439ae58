"""How much templates may be asked for: what was simulated of them, and how many requests may be lost.

A service's phases may each lose a multiple of their due: prompts may wait too long for their first token, and
answers come too slowly. While nothing is known to be lost a phase is *free*: its templates carry all that the
performance model gives them. Where a simulation finds too much lost the multiple falls, and between the
largest that was enough and the least that was not it is searched by halves of a logarithm.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import numpy as np

from atoll.core.ids import Phase, parse_role
from atoll.prove.load_curves import LoadCurve
from atoll.solve.derating import Derating

if TYPE_CHECKING:
    from atoll.plan.plan import Instance
    from atoll.plan.problem import Problem
    from atoll.prove.kept import KeptShares
    from atoll.prove.prospects import Key

Unknown = Literal["likely", "nothing"]

_FREE_MULTIPLE = 16.0
"""The multiple at which a phase may lose as much as it does."""
_MIN_MULTIPLE = 0.02
_FIRST_ANSWERS = 4.0
"""Requests that decode may lose when a service is first found short: most of them, since it has a cliff."""
_SAME_FACTOR = 1.3
"""Multiples that are closer than this are one."""
_FOR_PROMPTS = 0.85
"""Of the requests that may break a promise where phases run apart, the share that may wait too long for their
first token. Queues grow smoothly with load and decoding has a cliff, so little is left for it."""
_UNEXPLAINED_FACTOR = 2.5
"""So many times as many late first tokens as prefill was sized for may not be due to prefill."""
_HELPED_SHARE = 0.8
"""When less than this share of late first tokens is left, tightening prefill helped."""
_USE_FACTOR = 0.94
"""Factor on use where phases lose more together than alone."""
_MIN_USE = 0.6
"""How far use is cut."""
_SAMPLES_PER_SIZE = 3
"""After so many templates of a role with so many nodes others of them are taken to be like them."""
_MAX_NODES = 16
"""Nodes that a template may have, and more."""


@dataclass
class Multiple:
    """How many times its due a phase may lose: now, the largest that was enough, the least that was not."""

    now: float = _FREE_MULTIPLE
    good: float = 0.0
    bad: float = math.inf

    @property
    def is_free(self) -> bool:
        """Whether anything may be lost."""
        return self.now >= _FREE_MULTIPLE

    def tighten(self, start: float, step: float) -> None:
        """Take less after too much was lost: the middle to what was enough, a step less, or a first guess."""
        # The multiple that was just tried lost too much, whatever comes next.
        free, self.bad = self.is_free, min(self.bad, self.now)
        if self.good > 0.0:
            # The geometric mean: multiples span orders of magnitude.
            self.now = math.sqrt(self.good * self.bad)
        elif free:
            self.now = start
        else:
            self.now = max(_MIN_MULTIPLE, self.now * step)

    def note_enough(self) -> None:
        """Remember that this was enough."""
        self.good = max(self.good, self.now)

    def note_too_much(self) -> None:
        """Remember that this was too much, where it is more than was enough."""
        if self.now > self.good:
            self.bad = min(self.bad, self.now)

    def probe(self) -> bool:
        """Try more than was enough, where that can be; say whether."""
        # Nothing is known to be enough, or good and bad are too close to tell apart.
        if self.good <= 0.0 or self.good * _SAME_FACTOR >= min(self.bad, _FREE_MULTIPLE):
            return False
        self.now = _FREE_MULTIPLE if self.bad > _FREE_MULTIPLE else math.sqrt(self.good * self.bad)
        return True

    def settle(self) -> None:
        """Go back to what was enough."""
        if self.good > 0.0:
            self.now = self.good


@dataclass
class Allowance:
    """How many requests of a service may be lost by its phases."""

    target: float
    prompts: Multiple = field(default_factory=Multiple)
    answers: Multiple = field(default_factory=Multiple)
    late: float = 0.0
    """The share of first tokens that came too late when this was last tightened."""
    blamed: bool = False
    """Whether decode is taken to be what they waited for."""
    used: dict[Phase, float] = field(default_factory=dict)
    """By phase, the share that may be used of what instances carry alone; all of it where nothing is said."""

    @property
    def multiples(self) -> tuple[Multiple, Multiple]:
        """Both phases'."""
        return self.prompts, self.answers

    def share(self, phase: Phase) -> float:
        """The share of requests that must keep the promise of a phase; 0 where it is free."""
        multiple = self.answers if phase is Phase.DECODE else self.prompts
        if multiple.is_free:
            return 0.0
        due = {Phase.PREFILL: _FOR_PROMPTS, Phase.DECODE: 1.0 - _FOR_PROMPTS}.get(phase, 1.0)
        return max(0.1, 1.0 - (1.0 - self.target) * due * multiple.now)

    def tighten(self, kept: KeptShares, together: bool) -> None:
        """Let the phase lose less that loses most; `together` where instances do both phases.

        The other one too where it alone loses more than the service may. What answers do not lose is left for
        prompts. First tokens that come later than prefill alone explains may wait for decode to take them:
        decode is tightened, and prefill again once that no longer helps.
        """
        may = 1.0 - self.target
        late, slow = 1.0 - kept.ttft, 1.0 - kept.tpot
        # Instances that do both phases have one queue, so there is one multiple to tighten.
        if together:
            self.prompts.tighten(1.0, _step(may, 1.0 - kept.both))
            return
        unexplained = late > _UNEXPLAINED_FACTOR * (1.0 - self.share(Phase.PREFILL))
        if not unexplained:
            self.blamed = False
        elif late > _HELPED_SHARE * self.late:
            self.blamed = not self.blamed
        self.late = late
        if (late >= slow or late > may) and not self.blamed:
            # What the other phase loses is taken from the due, but a fifth of it always remains.
            left = max(may - slow, 0.2 * may)
            self.prompts.tighten(left / (_FOR_PROMPTS * may), _step(left, late))
        if slow > late or slow > may or self.blamed:
            left = max(may - late, 0.2 * may)
            lost = late if self.blamed else slow
            self.answers.tighten(_FIRST_ANSWERS, _step(left, lost))
        elif self.answers.is_free:
            # For the time being: whether it must be is tried once a plan is found.
            self.answers.now = _FIRST_ANSWERS

    def trim(self, kept: KeptShares) -> bool:
        """Have the phase that loses most use less of what instances carry alone; say whether it still can.

        For losses that no instance shows by itself.
        """
        phases = (Phase.BOTH, Phase.PREFILL if kept.ttft <= kept.tpot else Phase.DECODE)
        for phase in phases:
            self.used[phase] = self.used.get(phase, 1.0) * _USE_FACTOR
        return min(self.used.values()) > _MIN_USE


def _step(left: float, lost: float) -> float:
    """By what to multiply what may be lost, to lose so much."""
    # Aims a little below what may be lost; one step is neither too small to matter nor a leap.
    return float(np.clip(0.85 * left / max(lost, 1e-6), 0.3, 0.85))


@dataclass
class Sizing:
    """Capacities of templates found so far, and how many requests may be lost."""

    base: Problem
    allowances: dict[str, Allowance]
    curves: dict[Key, LoadCurve] = field(default_factory=dict)
    instances: dict[Key, Instance] = field(default_factory=dict)
    engines: dict[Key, str | None] = field(default_factory=dict)
    """Engines of templates that carry more in simulation than the one that the model prefers there."""
    compared: set[Key] = field(default_factory=set)
    """Templates of which all engines were simulated."""
    _problems: dict[tuple[float, ...], Problem] = field(default_factory=dict)

    @property
    def problem(self) -> Problem:
        """The problem with capacity for about the shares of prompts that are asked for: half where free."""
        shares = tuple(self._sized(service.name) for service in self.base.services)
        # The very same problem as long as nothing changes: much is remembered by it.
        if shares not in self._problems:
            self._problems[shares] = self.base.replace(
                services=tuple(
                    service.model_copy(update={"attainment": share})
                    for service, share in zip(self.base.services, shares, strict=True)
                ),
                settings=self.base.settings.model_copy(update={"sized_for": "share"}),
            )
        return self._problems[shares]

    def _sized(self, service: str) -> float:
        own = self.allowances[service]
        return 0.5 if own.prompts.is_free else own.target

    def _used(self, role: str) -> float:
        named = parse_role(role)
        return self.allowances[named.model].used.get(named.phase, 1.0)

    def share(self, role: str) -> float:
        """The share of requests that must keep the promise of a role; 0 where that is free."""
        named = parse_role(role)
        return self.allowances[named.model].share(named.phase)

    def carried(self, key: Key) -> float:
        """The most that a template that was simulated carries with its promise kept, in units/s."""
        return self.curves[key].load(self.share(key[0])) * self.instances[key].throughput_per_s

    def derating(self, unknown: Unknown, hope: float = 0.5) -> Derating:
        """Derating of templates; those not simulated carry nothing, or what others like them do.

        Those count between the mean and the best of the others: `hope`, 0 to 1, says where.
        """
        roles = {f"{service.name}/llm/{phase}" for service in self.base.services for phase in Phase}
        # A free phase carries its analytic throughput, whatever was simulated.
        free = {role for role in roles if self.share(role) <= 0.0}
        held = {role: self._used(role) for role in roles}
        priors = {(role, nodes): held[role] for role in free for nodes in range(1, _MAX_NODES)}
        shares = {
            key: curve.load(self.share(key[0])) * held[key[0]]
            for key, curve in self.curves.items()
            if key[0] not in free
        }
        if unknown != "likely":
            return Derating(shares, priors, default=0.0, engines=self.engines)
        seen: dict[tuple[str, int], list[float]] = {}
        for (role, nodes), share in shares.items():
            seen.setdefault((role, sum(number for _, number in nodes)), []).append(share)
        priors |= {
            like: min(1.0, max(0.05, (1.0 - hope) * float(np.mean(some)) + hope * max(some)))
            for like, some in seen.items()
            # Fewer samples say too little about others of the same size.
            if len(some) >= _SAMPLES_PER_SIZE
        }
        return Derating(shares, priors, engines=self.engines)

"""Changes of executors and of the paths over them from one plan to the next, equal ones together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

from atoll.core.frozen import Frozen
from atoll.core.units import format_price, format_share
from atoll.plan.plan import Instance, Plan, RequestPath
from atoll.plan.validate.violation import differs

Pattern = tuple[str, str, str, str]
"""Services that share it, parts, kind of node with its market where that is spot, region."""


class ExecutorChange(Frozen):
    """Executors of the same parts on the same kind of node: how many stay, start again, start and stop.

    `restarted` are of those that stay, on other GPUs than before: they load weights again.
    """

    service: str
    parts: str
    kind: str
    region: str
    kept: int
    restarted: int
    started: int
    stopped: int
    usd_before: float
    usd_after: float

    @property
    def changes(self) -> bool:
        """Whether any of them start, stop or start again."""
        return bool(self.started or self.stopped or self.restarted)

    @property
    def name(self) -> str:
        """Whose they are, what they run and on what: "docs: vision on T4:1 in lab"."""
        return f"{self.service}: {self.parts} on {self.kind} in {self.region}"

    def lines(self) -> list[str]:
        """Return what happens to them, one a line."""
        found = []
        if self.started:
            found.append(f"+ {self.started}x {self.name}, {self._cost(self.usd_after)}")
        if self.stopped:
            found.append(f"- {self.stopped}x {self.name}, {self._cost(self.usd_before)}")
        if self.restarted:
            found.append(f"~ {self.restarted}x {self.name}: starts again: same nodes, other GPUs")
        return found

    def _cost(self, usd_per_hour: float) -> str:
        total = self.kept + (self.started or self.stopped)
        return (
            f"{format_price(usd_per_hour)} for all {total}"
            if total > 1
            else (format_price(usd_per_hour))
        )


class PathChange(Frozen):
    """A path of a class over kinds of executors, and its share of the class before and after."""

    service: str
    klass: str
    path: str
    before: float
    after: float

    @property
    def text(self) -> str:
        """The change in a line."""
        shares = f"{format_share(self.before)} -> {format_share(self.after)}"
        return f"{self.service}, '{self.klass}', {shares}: {self.path}"


def executor_changes(
    before: Plan, after: Plan, pairs: Iterable[tuple[Instance, Instance, bool]]
) -> tuple[ExecutorChange, ...]:
    """Return by pattern what becomes of executors; `pairs` stay, True where on other GPUs."""
    kept: defaultdict[Pattern, int] = defaultdict(int)
    restarted: defaultdict[Pattern, int] = defaultdict(int)
    have, want = _count(before), _count(after)
    for old, _, moved in pairs:
        if _pattern(old) in have:
            kept[_pattern(old)] += 1
            restarted[_pattern(old)] += moved
    return tuple(
        ExecutorChange(
            service=pattern[0],
            parts=pattern[1],
            kind=pattern[2],
            region=pattern[3],
            kept=kept[pattern],
            restarted=restarted[pattern],
            started=want.get(pattern, (0, 0.0))[0] - kept[pattern],
            stopped=have.get(pattern, (0, 0.0))[0] - kept[pattern],
            usd_before=have.get(pattern, (0, 0.0))[1],
            usd_after=want.get(pattern, (0, 0.0))[1],
        )
        for pattern in sorted({*have, *want})
    )


def path_changes(before: Plan, after: Plan) -> tuple[PathChange, ...]:
    """Return the paths whose share of their class changes, over kinds of executors, not single ones."""
    old, new = _shares(before), _shares(after)
    return tuple(
        PathChange(
            service=key[0],
            klass=key[1],
            path=key[2],
            before=old.get(key, 0.0),
            after=new.get(key, 0.0),
        )
        for key in sorted({*old, *new})
        if differs(old.get(key, 0.0), new.get(key, 0.0))
    )


def _pattern(instance: Instance) -> Pattern:
    node = instance.nodes[0]
    spot = " spot" if node.market == "spot" else ""
    return (instance.whose, "+".join(instance.parts), f"{node.kind}{spot}", instance.region)


def _count(plan: Plan) -> dict[Pattern, tuple[int, float]]:
    """Executors by pattern: how many, and what they cost."""
    found: dict[Pattern, tuple[int, float]] = {}
    for instance in plan.executor_instances:
        number, usd = found.get(_pattern(instance), (0, 0.0))
        found[_pattern(instance)] = (number + 1, usd + instance.usd_per_hour)
    return found


def _shares(plan: Plan) -> dict[tuple[str, str, str], float]:
    executors = {i.id: i for i in plan.executor_instances}
    shares: defaultdict[tuple[str, str, str], float] = defaultdict(float)
    for path in plan.paths:
        shares[path.service, path.klass, _describe(path, executors)] += path.share
    return dict(shares)


def _describe(path: RequestPath, executors: Mapping[str, Instance]) -> str:
    """A path over kinds, whichever and however many executors of a kind it leads over."""
    steps = []
    for step in path.steps:
        known = (executors[name] for name in step.instances if name in executors)
        kinds = sorted({_pattern(one)[2] for one in known}) or sorted(step.instances)
        steps.append(f"{'+'.join(step.parts)} on {' or '.join(kinds)}")
    return " -> ".join(steps)

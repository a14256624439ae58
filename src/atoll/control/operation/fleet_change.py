"""Changes of a decision, as people are shown them before they happen: instances, cost, dips."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from atoll.control.decision.control_view import View
from atoll.control.decision.decide import Decision, DrainInstance, StartInstance, StopInstance
from atoll.control.decision.machine_pool import rent_of
from atoll.control.decision.path import CapacityDip
from atoll.core.units import format_price, format_throughput, pluralize
from atoll.plan.plan import Instance


@dataclass(frozen=True, slots=True)
class ChangeLine:
    """An instance that comes or goes: where, what it costs, and why or when."""

    instance: str
    target: str
    layout: str
    usd_per_hour: float
    reason: str


@dataclass(frozen=True, slots=True)
class FleetChange:
    """The whole way from what stands to the plan in force, of which a decision is the next step.

    `goes` are drained once what replaces them serves, `stops` have failed or never served. Costs are what all
    of it costs per hour before and after, in dollars; in between old and new may stand side by side.
    """

    fleet: str
    stays: tuple[str, ...]
    starts: tuple[ChangeLine, ...]
    goes: tuple[ChangeLine, ...]
    stops: tuple[ChangeLine, ...]
    usd_before: float
    usd_after: float
    dips: tuple[CapacityDip, ...]
    reasons: tuple[str, ...]
    waits: tuple[str, ...]

    @property
    def is_empty(self) -> bool:
        """Whether everything stays as it is."""
        return not (self.starts or self.goes or self.stops)

    def text(self) -> str:
        """Return the change in lines, for a terminal."""
        counts = ", ".join(
            f"{pluralize(len(rows), 'instance') if at == 0 else len(rows)} {word}"
            for at, (rows, word) in enumerate(
                (
                    (self.stays, "stays" if len(self.stays) == 1 else "stay"),
                    (self.starts, "to start"),
                    (self.goes, "to drain"),
                    (self.stops, "to stop"),
                )
            )
        )
        lines = [f"{self.fleet}: {counts}"]
        lines += [f"  = {name}" for name in self.stays]
        for sign, rows in (("+", self.starts), ("-", self.goes), ("x", self.stops)):
            for row in rows:
                price = f", {format_price(row.usd_per_hour)}" if sign != "x" else ""
                lines.append(
                    f"  {sign} {row.instance} on {row.target}: {row.layout}{price} ({row.reason})"
                )
        lines.append(f"cost: {format_price(self.usd_before)} -> {format_price(self.usd_after)}")
        if self.dips:
            lines += [f"dip: {describe_dip(dip)}" for dip in self.dips]
        else:
            lines.append("dips: none")
        lines += [f"why: {reason}" for reason in self.reasons]
        lines += [f"waits: {wait}" for wait in self.waits]
        return "\n".join(lines)


def describe_dip(dip: CapacityDip) -> str:
    """Return a dip in a line."""
    return (
        f"{dip.lane} carries {format_throughput(dip.after_per_s)} of "
        f"{format_throughput(dip.demand_per_s)} asked for a while: {dip.reason}"
    )


def find_change(
    view: View,
    decision: Decision,
    target_of: Callable[[Instance], str],
    dips: Sequence[CapacityDip] = (),
) -> FleetChange:
    """Return what a decision changes, and what follows from the plan it puts in force.

    `dips` are foreseen on the way besides those that the decision knows of.
    """
    why = {
        (action.instance.id if isinstance(action, StartInstance) else action.id): action.reason
        for action in decision.actions
        if isinstance(action, StartInstance | DrainInstance | StopInstance)
    }
    wanted = {} if decision.plan is None else {one.id: one for one in decision.plan.instances}
    held = {seen.id: seen for seen in view.instances if seen.status.state in ("starting", "ready")}
    stopped = {action.id for action in decision.actions if isinstance(action, StopInstance)}
    offers = view.offers or view.problem.offers

    def line(instance: Instance, name: str, otherwise: str) -> ChangeLine:
        return ChangeLine(
            name,
            target_of(instance),
            f"{instance.service} as {instance.describe()} in {instance.region}",
            instance.usd_per_hour,
            why.get(name, otherwise),
        )

    return FleetChange(
        fleet=view.problem.name,
        stays=tuple(sorted(name for name in held if name in wanted and name not in stopped)),
        starts=tuple(
            line(one, name, "when there is room")
            for name, one in sorted(wanted.items())
            if name not in held
        ),
        goes=tuple(
            line(seen.instance, name, "once it is not needed any more")
            for name, seen in sorted(held.items())
            if name not in wanted and name not in stopped
        ),
        stops=tuple(
            line(seen.instance, seen.id, "")
            for seen in view.instances
            if seen.id in stopped and seen.status.state != "gone"
        ),
        usd_before=rent_of(offers, [seen.instance for seen in held.values()]),
        usd_after=rent_of(offers, list(wanted.values())),
        dips=tuple(dict.fromkeys((*decision.dips, *dips))),
        reasons=decision.reasons,
        waits=decision.waits,
    )

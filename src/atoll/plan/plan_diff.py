"""Changes from one plan to the next: instances, nodes, cost, capacity.

An instance of one plan is the same as one of the other if they stand in the same region on the same
nodes; it is "relaid" if its nodes then hold other layers, and "moved" if a slice of it is then on other GPUs;
both mean loading weights again.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable

from pydantic import Field

from atoll.core.frozen import Frozen, without_blanks
from atoll.core.ids import Phase, parse_role
from atoll.core.units import format_price, format_share, format_throughput
from atoll.plan.executor_diff import ExecutorChange, PathChange, executor_changes, path_changes
from atoll.plan.plan import Instance, Market, Plan
from atoll.plan.validate.violation import differs


class KeptInstance(Frozen):
    """An instance of both plans, by its id in each; `relaid` with other layers, `moved` with other GPUs."""

    before: str
    after: str
    relaid: bool
    moved: bool = False
    executor: bool = Field(default=False, exclude=True)

    @property
    def text(self) -> str | None:
        """The change in words; None if nothing changes."""
        changes = ["other layers"] * self.relaid + ["other GPUs"] * self.moved
        return f"starts again: same nodes, {' and '.join(changes)}" if changes else None


class ChangedInstance(Frozen):
    """An instance of one plan only."""

    id: str
    role: str
    region: str
    layout: str
    throughput_per_s: float
    usd_per_hour: float

    @property
    def executor(self) -> bool:
        """Whether it runs parts of an any-to-any model."""
        return parse_role(self.role).phase is Phase.SERVE


class NodeChange(Frozen):
    """So many machines of one type more or fewer."""

    region: str
    node_type: str
    market: Market
    count: int


class ServiceChange(Frozen):
    """Cost of a service per hour and capacity of each of its roles, before and after."""

    service: str
    usd_before: float
    usd_after: float
    throughput_before: dict[str, float]
    throughput_after: dict[str, float]


class MixChange(Frozen):
    """The shares of requests that models of a choice answer, before and after, where these differ.

    Errors are the mean ones; None where a plan does not know the choice.
    """

    choice: str
    shares_before: dict[str, float]
    shares_after: dict[str, float]
    error_before: float | None = None
    error_after: float | None = None

    @property
    def text(self) -> str:
        """The change in words."""
        models = sorted({*self.shares_before, *self.shares_after})
        shares = (
            f"{model} {format_share(self.shares_before.get(model, 0.0))} -> "
            f"{format_share(self.shares_after.get(model, 0.0))}"
            for model in models
        )
        errors = ""
        if self.error_before is not None and self.error_after is not None:
            errs = f"{format_share(self.error_before)} -> {format_share(self.error_after)}"
            errors = f"; errs {errs}"
        return f"{self.choice}: {', '.join(shares)}{errors}"


class PlanDiff(Frozen):
    """Everything that changes from plan `before` to plan `after`.

    `idle_before` and `idle_after` are paid per hour for GPUs of cut machines that no instance has.
    `executors` and `paths` are of any-to-any models: what becomes of executors, equal ones together, and the
    paths whose shares change. Executors are among `kept`, `started` and `stopped`, too, one by one.
    `mixes` are the choices between models whose shares change.
    """

    before: str
    after: str
    kept: tuple[KeptInstance, ...]
    started: tuple[ChangedInstance, ...]
    stopped: tuple[ChangedInstance, ...]
    rented: tuple[NodeChange, ...]
    returned: tuple[NodeChange, ...]
    services: tuple[ServiceChange, ...]
    usd_before: float
    usd_after: float
    idle_before: float = 0.0
    idle_after: float = 0.0
    executors: tuple[ExecutorChange, ...] = ()
    paths: tuple[PathChange, ...] = ()
    mixes: tuple[MixChange, ...] = ()

    # What only any-to-any models and choices have.
    _without_blanks = without_blanks("executors", "paths", "mixes")

    @property
    def empty(self) -> bool:
        """Whether nothing changes."""
        moved = any(pair.relaid or pair.moved for pair in self.kept)
        changed = self.started or self.stopped or self.services or self.paths or self.mixes or moved
        return not changed and not differs(self.usd_before, self.usd_after)

    def text(self) -> str:
        """Return the changes for people, one a line."""
        lines = [f"{_money(self.usd_before, self.usd_after)}; {len(self.kept)} instances stay"]
        lines += [f"+ {_line(instance)}" for instance in self.started if not instance.executor]
        lines += [f"- {_line(instance)}" for instance in self.stopped if not instance.executor]
        lines += [
            f"~ {pair.before}{'' if pair.before == pair.after else f' -> {pair.after}'}: {pair.text}"
            for pair in self.kept
            if pair.text and not pair.executor
        ]
        lines += [line for change in self.executors for line in change.lines()]
        lines += [f"rent {_nodes(change)}" for change in self.rented]
        lines += [f"return {_nodes(change)}" for change in self.returned]
        lines += [_service_line(change) for change in self.services]
        if differs(self.idle_before, self.idle_after):
            lines.append(f"idle GPUs: {_money(self.idle_before, self.idle_after)}")
        lines += [f"path of {change.text}" for change in self.paths]
        lines += [f"models of {change.text}" for change in self.mixes]
        return "nothing changes" if self.empty else "\n".join(lines)


def diff(before: Plan, after: Plan) -> PlanDiff:
    """Return what changes from one plan to another; see `PlanDiff`."""
    pairs = _match_instances(before.instances, after.instances)
    old, new = {a.id for a, _ in pairs}, {b.id for _, b in pairs}
    have, want = before.count_nodes(), after.count_nodes()
    return PlanDiff(
        before=before.problem_name,
        after=after.problem_name,
        kept=tuple(
            KeptInstance(
                before=a.id,
                after=b.id,
                relaid=a.placement_key != b.placement_key,
                moved=_gpus(a) != _gpus(b),
                executor=bool(a.executor_parts),
            )
            for a, b in pairs
        ),
        started=tuple(_changes(i) for i in after.instances if i.id not in new),
        stopped=tuple(_changes(i) for i in before.instances if i.id not in old),
        rented=_node_changes(want - have),
        returned=_node_changes(have - want),
        services=tuple(_services(before, after)),
        usd_before=before.usd_per_hour,
        usd_after=after.usd_per_hour,
        idle_before=before.idle_usd,
        idle_after=after.idle_usd,
        executors=executor_changes(before, after, ((a, b, _gpus(a) != _gpus(b)) for a, b in pairs)),
        paths=path_changes(before, after),
        mixes=tuple(_mix_changes(before, after)),
    )


def _mix_changes(before: Plan, after: Plan) -> Iterable[MixChange]:
    """Yield the choices whose models answer other shares; ways to the same model count together."""
    old, new = ({mix.name: mix for mix in plan.mixes} for plan in (before, after))
    for name in sorted({*old, *new}):
        mine, then = old.get(name), new.get(name)
        shares_a = {} if mine is None else mine.model_shares
        shares_b = {} if then is None else then.model_shares
        same = shares_a.keys() == shares_b.keys()
        if same and not any(differs(shares_a[model], shares_b[model]) for model in shares_a):
            continue
        yield MixChange(
            choice=name,
            shares_before=shares_a,
            shares_after=shares_b,
            error_before=None if mine is None else mine.error,
            error_after=None if then is None else then.error,
        )


def _gpus(instance: Instance) -> list[tuple[str, int, tuple[int, ...]]]:
    """Where the slices of an instance are, whichever layers they hold."""
    return sorted(
        (node.host or node.node_type, node.slot or 0, node.gpu_ids)
        for node in instance.nodes
        if node.gpu_ids is not None
    )


def _match_instances(
    before: Iterable[Instance], after: Iterable[Instance]
) -> tuple[tuple[Instance, Instance], ...]:
    """Pair instances on the same nodes: of one name, then of one layout and place, of one layout, any."""
    old, new = list(before), list(after)
    pairs: list[tuple[Instance, Instance]] = []
    keys: tuple[Callable[[Instance], Hashable], ...] = (
        lambda instance: (instance.id, instance.rental_key),
        lambda instance: (instance.placement_key, tuple(_gpus(instance))),
        lambda instance: instance.placement_key,
        lambda instance: instance.rental_key,
    )
    for key in keys:
        for value in dict.fromkeys(key(instance) for instance in old):
            left = sorted((i for i in old if key(i) == value), key=lambda i: i.id)
            right = sorted((i for i in new if key(i) == value), key=lambda i: i.id)
            pairs += zip(left, right, strict=False)
        taken = {id(instance) for pair in pairs for instance in pair}
        old = [instance for instance in old if id(instance) not in taken]
        new = [instance for instance in new if id(instance) not in taken]
    return tuple(sorted(pairs, key=lambda pair: (pair[0].id, pair[1].id)))


def _changes(instance: Instance) -> ChangedInstance:
    return ChangedInstance(
        id=instance.id,
        role=instance.role,
        region=instance.region,
        layout=instance.describe(),
        throughput_per_s=instance.throughput_per_s,
        usd_per_hour=instance.usd_per_hour,
    )


def _node_changes(counts: dict[tuple[str, str, Market], int]) -> tuple[NodeChange, ...]:
    return tuple(
        NodeChange(region=region, node_type=kind, market=market, count=count)
        for (region, kind, market), count in sorted(counts.items())
    )


def _services(before: Plan, after: Plan) -> Iterable[ServiceChange]:
    """Yield the services whose cost or capacity changes."""
    names = sorted({*before.served_services, *after.served_services})
    for name in names:
        (usd_a, rates_a), (usd_b, rates_b) = _service(before, name), _service(after, name)
        same = rates_a.keys() == rates_b.keys() and not any(
            differs(rates_a[role], rates_b[role]) for role in rates_a
        )
        if not same or differs(usd_a, usd_b):
            yield ServiceChange(
                service=name,
                usd_before=usd_a,
                usd_after=usd_b,
                throughput_before=rates_a,
                throughput_after=rates_b,
            )


def _service(plan: Plan, name: str) -> tuple[float, dict[str, float]]:
    instances = [instance for instance in plan.instances if name in instance.services]
    rates: dict[str, float] = {}
    for instance in sorted(instances, key=lambda i: i.role):
        rates[instance.role] = rates.get(instance.role, 0.0) + instance.carries(name)
    return sum(one.usd_per_hour * one.part_of(name) for one in instances), rates


def _money(before: float, after: float) -> str:
    change = after - before
    percent = f", {change / before:+.1%}" if before > 0 else ""
    sign = "-" if change < 0 else "+"
    return (
        f"{format_price(before)} -> {format_price(after)} "
        f"({sign}{format_price(abs(change))}{percent})"
    )


def _line(instance: ChangedInstance) -> str:
    return (
        f"{instance.id} in {instance.region}: {instance.layout}, "
        f"{format_throughput(instance.throughput_per_s)}, {format_price(instance.usd_per_hour)}"
    )


def _nodes(change: NodeChange) -> str:
    return f"{change.count}x {change.node_type} ({change.market}) in {change.region}"


def _service_line(change: ServiceChange) -> str:
    rates: list[str] = []
    for role in sorted({*change.throughput_before, *change.throughput_after}):
        before = change.throughput_before.get(role, 0.0)
        after = change.throughput_after.get(role, 0.0)
        if differs(before, after):
            change_of_rate = f"{format_throughput(before)} -> {format_throughput(after)}"
            _, component, phase = role.rsplit("/", 2)
            rates.append(f"{component if phase == Phase.SERVE else phase} {change_of_rate}")
    return "; ".join([f"{change.service}: {_money(change.usd_before, change.usd_after)}", *rates])

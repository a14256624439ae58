"""Changes from one plan to the next: in the terminal and as HTML."""

from __future__ import annotations

from typing import TYPE_CHECKING

from atoll.core.units import format_price, format_share, format_throughput, pluralize
from atoll.plan.plan_diff import PlanDiff, ServiceChange
from atoll.report.render import Grid, render_fragment

if TYPE_CHECKING:
    from rich.console import RenderableType

_TEMPLATE = "diff.html.j2"


def draw_diff(change: PlanDiff) -> RenderableType:
    """Return the changes for a terminal, one a line."""
    from rich.text import Text

    return Text(change.text())


def render_diff_fragment(change: PlanDiff) -> str:
    """Return the changes as one HTML element, for a notebook."""
    return render_fragment(_TEMPLATE, _gather(change))


def _gather(change: PlanDiff) -> dict[str, object]:
    """Everything that `pages/diff.html.j2` shows."""
    names = change.before if change.before == change.after else f"{change.before} to {change.after}"
    return {
        "title": f"Changes of {names}",
        "empty": change.empty,
        "cards": [
            ("cost before", format_price(change.usd_before)),
            ("cost after", format_price(change.usd_after)),
            *_list_idle(change),
            ("instances stay", f"{len(change.kept)}"),
            ("instances start", f"{len(change.started)}"),
            ("instances stop", f"{len(change.stopped)}"),
        ],
        "instances": _list_instances(change),
        "nodes": _list_nodes(change),
        "services": _list_services(change),
        "executors": _list_executors(change),
        "paths": _list_paths(change),
        "mixes": _list_mixes(change),
    }


def _list_idle(change: PlanDiff) -> list[tuple[str, str]]:
    """Cost of idle GPUs of cut machines before and after, if there are any."""
    if not change.idle_before and not change.idle_after:
        return []
    return [
        ("idle GPUs", f"{format_price(change.idle_before)} to {format_price(change.idle_after)}")
    ]


def _list_instances(change: PlanDiff) -> Grid:
    columns = ("change", "instance", "region", "layers", "carries", "cost")
    rows: list[tuple[object, ...]] = [
        (
            what,
            instance.id,
            instance.region,
            instance.layout,
            format_throughput(instance.throughput_per_s),
            format_price(instance.usd_per_hour),
        )
        for what, instances in (("start", change.started), ("stop", change.stopped))
        for instance in instances
        if not instance.executor
    ]
    for pair in change.kept:
        if pair.text and not pair.executor:
            name = pair.before if pair.before == pair.after else f"{pair.before} -> {pair.after}"
            rows.append(("move", name, None, pair.text, None, None))
    return Grid(columns, rows, columns[4:])


def _list_executors(change: PlanDiff) -> Grid:
    """Executors of any-to-any models, equal ones together, where any of them changes."""
    return Grid.of(
        (one for one in change.executors if one.changes),
        {
            "service": lambda one: one.service,
            "parts": lambda one: one.parts,
            "on": lambda one: one.kind,
            "region": lambda one: one.region,
            "stay": lambda one: one.kept - one.restarted,
            "start again": lambda one: one.restarted or None,
            "start": lambda one: one.started or None,
            "stop": lambda one: one.stopped or None,
            "cost": lambda one: f"{format_price(one.usd_before)} to {format_price(one.usd_after)}",
        },
        right=("stay", "start again", "start", "stop", "cost"),
    )


def _list_paths(change: PlanDiff) -> Grid:
    columns = ("service", "class", "path", "share before", "after")
    rows = [
        (path.service, path.klass, path.path, format_share(path.before), format_share(path.after))
        for path in change.paths
    ]
    return Grid(columns, rows, columns[3:])


def _list_mixes(change: PlanDiff) -> Grid:
    columns = ("choice", "model", "share before", "after")
    rows = [
        (
            mix.choice,
            model,
            format_share(mix.shares_before.get(model, 0.0)),
            format_share(mix.shares_after.get(model, 0.0)),
        )
        for mix in change.mixes
        for model in sorted({*mix.shares_before, *mix.shares_after})
    ]
    return Grid(columns, rows, columns[2:])


def _list_nodes(change: PlanDiff) -> Grid:
    rows = [
        (what, pluralize(nodes.count, "node"), nodes.node_type, nodes.market, nodes.region)
        for what, changes in (("rent", change.rented), ("return", change.returned))
        for nodes in changes
    ]
    return Grid(("change", "nodes", "node type", "market", "region"), rows)


def _list_services(change: PlanDiff) -> Grid:
    columns = ("service", "cost before", "after", "role", "carries before", "after ")
    rows: list[tuple[object, ...]] = []
    for service in change.services:
        rows += _list_roles(service)
    return Grid(columns, rows, ("cost before", "after", "carries before", "after "))


def _list_roles(service: ServiceChange) -> list[tuple[object, ...]]:
    """A row for each role of a service; its costs stand in the first."""
    costs = (format_price(service.usd_before), format_price(service.usd_after))
    roles = sorted({*service.throughput_before, *service.throughput_after})
    rows: list[tuple[object, ...]] = []
    for at, role in enumerate(roles):
        carried = (service.throughput_before, service.throughput_after)
        head = (service.service, *costs) if at == 0 else ("", "", "")
        rows.append((*head, role, *(format_throughput(rates.get(role, 0.0)) for rates in carried)))
    return rows

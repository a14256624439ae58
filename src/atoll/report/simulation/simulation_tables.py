"""A simulation in the terminal, and as plain data: promises, latencies, nodes and cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Sized
from typing import TYPE_CHECKING

from atoll.core.units import (
    format_duration,
    format_price,
    format_share,
    format_throughput,
    format_usd,
)
from atoll.report.promises import (
    describe_groups,
    draw_verdicts,
    judge_run,
    list_kept_groups,
)
from atoll.report.render import Grid, Item
from atoll.report.terminal import jsonable, table
from atoll.sim.sim_result import NodeSummary, ServiceSummary, SimReport, Spread

if TYPE_CHECKING:
    from rich.console import RenderableType

    from atoll.plan.problem import Problem
    from atoll.sim.tasks.mixed_report import ServiceKept

_MOST_OF_RUN = 0.95
"""Share of a run in which requests come up to which its run-out is told."""
_MAX_SHOWN = 24
"""Units or executors in a terminal; pages list all."""


def format_time(seconds: float | None) -> str:
    """Write a duration, or "-" where nothing was measured."""
    return "-" if seconds is None else format_duration(seconds)


def format_part(share: float | None) -> str:
    """Write a share, or "-" where nothing was measured."""
    return "-" if share is None else format_share(share)


def summarize(report: SimReport) -> dict[str, object]:
    """Return a run as plain data, without its single requests."""
    series = report.series
    return {
        "plan": report.plan_name,
        "clock_s": report.clock_s,
        "window_s": report.window_s,
        "finished": report.finished,
        "dropped": report.dropped,
        "rejected": report.rejected,
        "retries": report.retries,
        "attainment": report.attainment,
        "tokens_per_s": report.tokens_per_s,
        "usd": report.usd,
        "usd_per_hour": report.usd_per_hour,
        "usd_per_million_tokens": report.usd_per_million_tokens,
        "measured": list(report.measured),
        "cpu_s": report.cpu_s,
        "services": [describe_service(service) for service in report.services],
        "nodes": jsonable(report.nodes),
        "instances": jsonable(report.instances),
        "losses": jsonable(report.losses),
        "link_busy": dict(report.link_busy),
        "component_busy": dict(report.component_busy),
        "series": {
            "bin_s": series.bin_s,
            "arrived": series.arrived.tolist(),
            "finished": series.finished.tolist(),
            "tokens": series.tokens.tolist(),
            "waiting": series.waiting.tolist(),
            "in_flight": series.flying.tolist(),
        },
    }


def describe_service(service: ServiceSummary | ServiceKept) -> dict[str, object]:
    """Return a service of a run as plain data, with whether each group of its requests keeps its promises."""
    record = jsonable(service)
    assert isinstance(record, dict)
    return {**record, "groups": describe_groups(service.groups)}


def list_run_groups(report: SimReport) -> Grid:
    """Return a row for each group of requests of a run's services."""
    return list_kept_groups((service.name, service.groups) for service in report.services)


def list_losses(report: SimReport) -> Grid:
    """Return a row for each loss and service: what requests kept that came before it, after it and later."""
    return Grid.of(
        report.losses[:_MAX_SHOWN],
        {
            "lost": lambda one: ", ".join(one.instances),
            "after": lambda one: format_time(one.time_s),
            "service": lambda one: one.service,
            "kept before": lambda one: format_part(one.before),
            "the next minute": lambda one: format_part(one.soon),
            "later": lambda one: format_part(one.later),
            "routes": lambda one: "ready in the plan" if one.ready else "found then",
        },
        right=("after", "kept before", "the next minute", "later"),
    )


def _say_run_out(report: SimReport) -> str:
    """Say in how much of the run requests came, where that is not nearly all of it."""
    came = float(report.requests.arrival_s.max(initial=0.0))
    short = 0.0 < came < _MOST_OF_RUN * report.clock_s and report.window_s <= came
    return f" (the last came after {format_duration(came)})" if short else ""


def describe_run(report: SimReport) -> str:
    """Return the run in one line."""
    parts = [
        f"{report.finished:,} requests in {format_duration(report.clock_s)}{_say_run_out(report)}",
        f"{format_part(report.attainment)} kept their promises",
        f"{report.tokens_per_s:,.0f} tokens/s",
    ]
    if report.usd > 0:
        cost = report.usd_per_million_tokens
        tokens = "" if cost is None else f", {format_usd(cost)} per million tokens"
        parts.append(f"{format_price(report.usd_per_hour)}{tokens}")
    lost = [
        f"{number:,} {what}"
        for number, what in (
            (report.dropped, "dropped"),
            (report.rejected, "turned away"),
            (report.retries, "started over"),
        )
        if number
    ]
    return "; ".join([", ".join(parts), *lost])


def list_promises(report: SimReport, problem: Problem) -> Grid:
    """Return a row for each service: what was promised, and what was kept."""

    def promised(seconds: float, kept: float | None) -> str:
        return f"{format_time(seconds)} ({format_part(kept)})"

    return Grid.of(
        ((service, problem.service(service.name)) for service in report.services),
        {
            "service": lambda s: s[0].name,
            "finished": lambda s: f"{s[0].finished:,}",
            "kept": lambda s: format_part(s[0].attainment),
            "TTFT p50 / p99": lambda s: _format_spread(s[0].ttft_s),
            "promised (kept)": lambda s: promised(s[1].ttft_s, s[0].attainment_ttft),
            "TPOT p50 / p99": lambda s: _format_spread(s[0].tpot_s),
            "promised (kept) ": lambda s: promised(s[1].tpot_s, s[0].attainment_tpot),
            "gap p99": lambda s: format_time(s[0].largest_gap_s.p99),
            "goodput": lambda s: format_throughput(s[0].goodput_requests_per_s),
            "tokens": lambda s: format_throughput(s[0].goodput_tokens_per_s),
        },
        right=("finished", "kept", "gap p99", "goodput", "tokens"),
    )


def _format_spread(spread: Spread) -> str:
    return f"{format_time(spread.p50)} / {format_time(spread.p99)}"


def list_nodes(nodes: Sequence[NodeSummary]) -> Grid:
    """Return a row for each unit: how busy, how full, how crowded."""
    return Grid.of(
        nodes,
        {
            "instance": lambda node: node.instance,
            "node": lambda node: node.node + (f".{node.group}" if node.group else ""),
            "type": lambda node: node.node_type,
            "layers": lambda node: f"[{node.layers[0]}, {node.layers[1]})",
            "busy": lambda node: f"{node.busy:.0%}",
            "batch": lambda node: f"{node.mean_sequences:.1f}",
            "KV mean": lambda node: f"{node.kv_mean:.0%}",
            "KV peak": lambda node: f"{node.kv_peak:.0%}",
            "queue": lambda node: f"{node.queue_mean:.1f}",
        },
        right=("busy", "batch", "KV mean", "KV peak", "queue"),
    )


def choose_busiest(there: Sequence[Item], busy: Callable[[Item], float]) -> list[Item]:
    """Return what to show: all, or those that have most to do, in the order of the plan."""
    if len(there) <= _MAX_SHOWN:
        return list(there)
    order = sorted(range(len(there)), key=lambda i: (-busy(there[i]), i))[:_MAX_SHOWN]
    return [there[i] for i in sorted(order)]


def say_busiest(shown: Sized, there: Sized) -> str | None:
    """Say that only the busiest are shown, unless all are."""
    return None if len(shown) == len(there) else f"the {len(shown)} busiest of {len(there)}"


def draw_simulation(report: SimReport, problem: Problem) -> RenderableType:
    """Return a run for a terminal; of many nodes only the busiest."""
    from rich.console import Group
    from rich.text import Text

    shown = choose_busiest(report.nodes, lambda node: node.busy)
    parts: list[RenderableType] = [
        *draw_verdicts(judge_run(report, problem)),
        Text(describe_run(report)),
        *(Text(f"Times of {line}.") for line in report.measured),
        list_promises(report, problem).draw(),
        *([groups.draw()] if (groups := list_run_groups(report)).rows else []),
        *([list_losses(report).draw()] if report.losses else []),
        list_nodes(shown).draw(caption=say_busiest(shown, report.nodes)),
    ]
    crowded = [f"{name} {share:.0%}" for name, share in report.link_busy.items() if share > 0.5]
    if crowded:
        parts.append(Text("links that send more than half of the time: " + ", ".join(crowded[:5])))
    if report.component_busy:
        rows = [(name, f"{share:.0%}") for name, share in report.component_busy.items()]
        parts.append(table(("component", "busy"), rows, right=("busy",)))
    return Group(*parts)

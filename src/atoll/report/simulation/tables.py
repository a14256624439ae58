"""A simulation in the terminal, and as plain data: promises, latencies, nodes and cost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from atoll.core.units import (
    format_duration,
    format_price,
    format_share,
    format_throughput,
    format_usd,
)
from atoll.report.promises import draw_verdicts, judge_run
from atoll.report.render import Grid
from atoll.report.terminal import jsonable, table
from atoll.sim.result import NodeSummary, SimReport

if TYPE_CHECKING:
    from rich.console import RenderableType

    from atoll.plan.problem import Problem

_MOST_NODES = 24


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
        "cpu_s": report.cpu_s,
        "services": jsonable(report.services),
        "nodes": jsonable(report.nodes),
        "instances": jsonable(report.instances),
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


def describe_run(report: SimReport) -> str:
    """Return the run in one line."""
    parts = [
        f"{report.finished:,} requests in {format_duration(report.clock_s)}",
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
    columns = (
        "service",
        "finished",
        "kept",
        "TTFT p50 / p99",
        "promised (kept)",
        "TPOT p50 / p99",
        "promised (kept) ",
        "gap p99",
        "goodput",
        "tokens",
    )
    rows = []
    for service in report.services:
        promised = problem.service(service.name)
        rows.append(
            (
                service.name,
                f"{service.finished:,}",
                format_part(service.attainment),
                f"{format_time(service.ttft_s.p50)} / {format_time(service.ttft_s.p99)}",
                f"{format_time(promised.ttft_s)} ({format_part(service.attainment_ttft)})",
                f"{format_time(service.tpot_s.p50)} / {format_time(service.tpot_s.p99)}",
                f"{format_time(promised.tpot_s)} ({format_part(service.attainment_tpot)})",
                format_time(service.largest_gap_s.p99),
                format_throughput(service.goodput_requests_per_s),
                format_throughput(service.goodput_tokens_per_s),
            )
        )
    return Grid(columns, rows, ("finished", "kept", "gap p99", "goodput", "tokens"))


def list_nodes(nodes: Sequence[NodeSummary]) -> Grid:
    """Return a row for each unit: how busy, how full, how crowded."""
    columns = (
        "instance",
        "node",
        "type",
        "layers",
        "busy",
        "batch",
        "KV mean",
        "KV peak",
        "queue",
    )
    rows = [
        (
            node.instance,
            node.node + (f".{node.group}" if node.group else ""),
            node.node_type,
            f"[{node.layers[0]}, {node.layers[1]})",
            f"{node.utilisation:.0%}",
            f"{node.mean_sequences:.1f}",
            f"{node.kv_mean:.0%}",
            f"{node.kv_peak:.0%}",
            f"{node.queue_mean:.1f}",
        )
        for node in nodes
    ]
    return Grid(columns, rows, columns[4:])


def choose_busiest(nodes: Sequence[NodeSummary]) -> list[NodeSummary]:
    """Return the units to show: all, or those that have most to do, in the order of the plan."""
    if len(nodes) <= _MOST_NODES:
        return list(nodes)
    order = sorted(range(len(nodes)), key=lambda i: (-nodes[i].utilisation, i))[:_MOST_NODES]
    return [nodes[i] for i in sorted(order)]


def draw_simulation(report: SimReport, problem: Problem) -> RenderableType:
    """Return a run for a terminal; of many nodes only the busiest."""
    from rich.console import Group
    from rich.text import Text

    shown = choose_busiest(report.nodes)
    caption = None
    if len(shown) < len(report.nodes):
        caption = f"the {len(shown)} busiest of {len(report.nodes)}"
    promises, nodes = list_promises(report, problem), list_nodes(shown)
    parts: list[RenderableType] = [
        *draw_verdicts(judge_run(report, problem)),
        Text(describe_run(report)),
        table(promises.columns, promises.rows, right=promises.right),
        table(nodes.columns, nodes.rows, caption=caption, right=nodes.right),
    ]
    crowded = [f"{name} {share:.0%}" for name, share in report.link_busy.items() if share > 0.5]
    if crowded:
        parts.append(Text("links that send more than half of the time: " + ", ".join(crowded[:5])))
    if report.component_busy:
        rows = [(name, f"{share:.0%}") for name, share in report.component_busy.items()]
        parts.append(table(("component", "busy"), rows, right=("busy",)))
    return Group(*parts)

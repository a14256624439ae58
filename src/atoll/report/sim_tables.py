"""What `atoll simulate` prints: promises, latencies, nodes and cost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from atoll.core.units import format_duration
from atoll.report.terminal import jsonable, table
from atoll.sim.result import NodeSummary, SimReport

if TYPE_CHECKING:
    from rich.console import RenderableType

    from atoll.plan.problem import Problem

_MOST_NODES = 24


def seconds(value: float | None) -> str:
    """Return a time for people."""
    return "-" if value is None else format_duration(value)


def percent(value: float | None) -> str:
    """Return a share for people."""
    return "-" if value is None else f"{value:.1%}"


def summary(found: SimReport) -> dict[str, object]:
    """Return a run as plain data, without its single requests."""
    series = found.series
    return {
        "plan": found.plan_name,
        "clock_s": found.clock_s,
        "window_s": found.window_s,
        "finished": found.finished,
        "dropped": found.dropped,
        "rejected": found.rejected,
        "retries": found.retries,
        "attainment": found.attainment,
        "tokens_per_s": found.tokens_per_s,
        "usd": found.usd,
        "usd_per_hour": found.usd_per_hour,
        "usd_per_million_tokens": found.usd_per_million_tokens,
        "cpu_s": found.cpu_s,
        "services": jsonable(found.services),
        "nodes": jsonable(found.nodes),
        "instances": jsonable(found.instances),
        "link_busy": dict(found.link_busy),
        "component_busy": dict(found.component_busy),
        "series": {
            "bin_s": series.bin_s,
            "arrived": series.arrived.tolist(),
            "finished": series.finished.tolist(),
            "tokens": series.tokens.tolist(),
            "waiting": series.waiting.tolist(),
            "in_flight": series.flying.tolist(),
        },
    }


def headline(found: SimReport) -> str:
    """Return the run in one line."""
    parts = [
        f"{found.finished:,} requests in {format_duration(found.clock_s)}",
        f"{percent(found.attainment)} kept their promises",
        f"{found.tokens_per_s:,.0f} tokens/s",
    ]
    if found.usd > 0:
        cost = found.usd_per_million_tokens
        said = "" if cost is None else f", ${cost:,.2f} per million tokens"
        parts.append(f"${found.usd_per_hour:,.2f}/h{said}")
    lost = [
        f"{number:,} {what}"
        for number, what in (
            (found.dropped, "dropped"),
            (found.rejected, "turned away"),
            (found.retries, "started over"),
        )
        if number
    ]
    return "; ".join([", ".join(parts), *lost])


def service_rows(found: SimReport, problem: Problem) -> list[list[object]]:
    """Return a row for each service: promises first, then what was kept."""
    rows: list[list[object]] = []
    for own in found.services:
        promised = problem.service(own.name)
        rows.append(
            [
                own.name,
                f"{own.finished:,}",
                percent(own.attainment),
                f"{seconds(own.ttft_s.p50)} / {seconds(own.ttft_s.p99)}",
                f"{seconds(promised.ttft_s)} ({percent(own.attainment_ttft)})",
                f"{seconds(own.tpot_s.p50)} / {seconds(own.tpot_s.p99)}",
                f"{seconds(promised.tpot_s)} ({percent(own.attainment_tpot)})",
                seconds(own.largest_gap_s.p99),
                f"{own.goodput_requests_per_s:.3g}/s",
                f"{own.goodput_tokens_per_s:,.0f}/s",
            ]
        )
    return rows


SERVICE_COLUMNS = (
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
NODE_COLUMNS = (
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


def node_row(own: NodeSummary) -> list[object]:
    """Return a row for a unit."""
    return [
        own.instance,
        own.node + (f".{own.group}" if own.group else ""),
        own.node_type,
        f"[{own.layers[0]}, {own.layers[1]})",
        f"{own.utilisation:.0%}",
        f"{own.mean_sequences:.1f}",
        f"{own.kv_mean:.0%}",
        f"{own.kv_peak:.0%}",
        f"{own.queue_mean:.1f}",
    ]


def busiest(nodes: Sequence[NodeSummary]) -> list[NodeSummary]:
    """Return the units to show: all, or those that have most to do, in the order of the plan."""
    if len(nodes) <= _MOST_NODES:
        return list(nodes)
    order = sorted(range(len(nodes)), key=lambda i: (-nodes[i].utilisation, i))[:_MOST_NODES]
    return [nodes[i] for i in sorted(order)]


def draw_report(found: SimReport, problem: Problem) -> RenderableType:
    """Return a run for people."""
    from rich.console import Group
    from rich.text import Text

    shown = busiest(found.nodes)
    caption = None
    if len(shown) < len(found.nodes):
        caption = f"the {len(shown)} busiest of {len(found.nodes)}"
    parts: list[RenderableType] = [
        Text(headline(found)),
        table(SERVICE_COLUMNS, service_rows(found, problem), right=("finished", "kept", "tokens")),
        table(
            NODE_COLUMNS, [node_row(own) for own in shown], caption=caption, right=NODE_COLUMNS[4:]
        ),
    ]
    crowded = [f"{name} {share:.0%}" for name, share in found.link_busy.items() if share > 0.5]
    if crowded:
        parts.append(Text("links that send more than half of the time: " + ", ".join(crowded[:5])))
    if found.component_busy:
        rows = [(name, f"{share:.0%}") for name, share in found.component_busy.items()]
        parts.append(table(("component", "busy"), rows, right=("busy",)))
    return Group(*parts)

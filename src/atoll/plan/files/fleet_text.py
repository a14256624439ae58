"""A problem with a fixed cluster written as a fleet file, so that a person can read and change it."""

from __future__ import annotations

import json

from atoll.core.units import format_duration
from atoll.plan.cluster import Cluster, ClusterLink
from atoll.plan.cluster_profiles import cluster_of
from atoll.plan.problem import Problem, Service


def profiles_text(problem: Problem) -> str:
    """Return the measured profiles of a problem's cluster as the text of a JSON file."""
    dumped = {
        name: {
            kind: profile.model_dump(mode="json", exclude_none=True)
            for kind, profile in kinds.items()
        }
        for name, kinds in cluster_of(problem).profiles.items()
    }
    return json.dumps(dumped, indent=1) + "\n"


def fleet_text(problem: Problem, profiles: str | None = None) -> str:
    """Return a problem with a cluster as the text of a fleet file; `profiles` names a file beside it.

    Reading it gives the problem back, but for prices and facts of its own (`overlays`).
    """
    cluster = cluster_of(problem)
    lines = [f"name: {problem.name}", "services:"]
    for service in problem.services:
        lines += _service(service)
    lines += ["cluster:", "  nodes:"]
    for site in cluster.regions:
        lines.append(f"    {site}:")
        lines += _machines(cluster, site)
    lines.append("  links:")
    lines += [f"    - {_link(link)}" for link in cluster.links]
    lines.append(f"  kv_fill: {cluster.kv_fill:g}")
    if profiles is not None and cluster.profiles:
        lines.append(f"  profiles: {json.dumps(profiles)}")
    lines += ["settings:", f"  engine: {problem.settings.engine}"]
    return "\n".join(lines) + "\n"


def _service(service: Service) -> list[str]:
    lengths = service.lengths
    spread = {
        "input_cv": (lengths.input_mean_square / lengths.input_mean**2 - 1) ** 0.5,
        "output_cv": (lengths.output_mean_square / lengths.output_mean**2 - 1) ** 0.5,
    }
    moments = {"input": lengths.input_mean, "output": lengths.output_mean}
    moments |= {name: value for name, value in spread.items() if value > 0}
    if lengths.input_tail > 0:
        moments["input_tail"] = lengths.input_tail
    written = ", ".join(f"{name}: {value!r}" for name, value in moments.items())
    unasked = "  # how much can be carried?" if service.rate_per_s == 0 else ""
    return [
        f"  {service.name}:",
        f"    model: {service.model}",
        f"    ttft: {format_duration(service.ttft_s)}",
        f"    tpot: {format_duration(service.tpot_s)}",
        f"    rate: {service.rate_per_s!r}{unasked}",
        f"    lengths: {{{written}}}",
    ]


def _machines(cluster: Cluster, site: str) -> list[str]:
    by_type: dict[str, list[str]] = {}
    for node in cluster.nodes:
        if node.region == site:
            by_type.setdefault(node.node_type, []).append(node.name)
    return [
        f"      {json.dumps(kind)}: [{', '.join(names)}]" for kind, names in sorted(by_type.items())
    ]


def _link(link: ClusterLink) -> str:
    way = ", one_way: true" if link.one_way else ""
    ends = ", ".join(json.dumps(end) for end in (link.src, link.dst))
    return (
        f"{{between: [{ends}], bandwidth: {link.bytes_per_s!r}, latency: {link.latency_s!r}{way}}}"
    )

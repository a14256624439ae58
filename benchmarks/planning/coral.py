"""The set-ups of the Coral paper (section 6.1) as problems: the example fleets, varied.

Core: three models on L40S, L4 and A10G nodes in two AWS regions, 10 requests/s each. Extended: six models,
A100-80 and H100 nodes and a GCP region as well, 25 requests/s each. What differs from the paper is said in
`examples/coral-core.yaml` and `coral-extended.yaml`. As in the paper phases run apart and machines are rented
for one instance each. `many_models` and `many_regions` are the extended set-up, larger.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from atoll.catalog import Catalog
from atoll.plan.files.fleet_file import load_fleet, parse_fleet
from atoll.plan.problem import Offer, Problem
from benchmarks.report import ROOT

LARGE = {"coral-core": ("qwen3-32b",), "coral-extended": ("qwen3-235b-a22b", "gpt-oss-120b")}
SMALL = {"coral-core": ("phi-4-14b",), "coral-extended": ("phi-4-14b", "gpt-oss-20b")}


@cache
def core_file() -> Problem:
    """Return the core set-up as its file has it."""
    return load_fleet(ROOT / "examples" / "coral-core.yaml")


@cache
def core() -> Problem:
    """Return the core set-up."""
    return _as_in_the_paper(core_file())


@cache
def extended() -> Problem:
    """Return the extended set-up."""
    return _as_in_the_paper(load_fleet(ROOT / "examples" / "coral-extended.yaml"))


def _as_in_the_paper(problem: Problem) -> Problem:
    """Phases apart, machines whole, any layout: what the paper plans; more is what Atoll can do beyond it."""
    services = tuple(s.model_copy(update={"phases": "apart"}) for s in problem.services)
    offers = tuple(o.model_copy(update={"whole": True}) for o in problem.offers)
    settings = problem.settings.model_copy(update={"engines": ()})
    return problem.replace(services=services, offers=offers, settings=settings)


def as_it_runs(problem: Problem) -> Problem:
    """Return a set-up with layouts that an engine runs."""
    settings = problem.settings.model_copy(update={"engines": core_file().settings.engines})
    return problem.replace(settings=settings)


HELIX_POOL = {
    "A100-40:1": (4, 2.7447),
    "V100-16:1": (6, 3.06),
    "L4:1": (8, 0.8048),
    "L4:2": (4, 1.6096),
    "T4:1": (10, 0.526),
    "T4:2": (6, 1.052),
    "T4:4": (4, 3.912),
}
"""Machines of Helix's cluster of high heterogeneity, and USD per hour in AWS US-East-2 (`prices.csv`): A100
pro rata of eight, L4:2 and T4:2 of one; V100 as it was last sold, in March 2026."""


@cache
def helix_cluster() -> Problem:
    """Return figure 12's pool and promises: Llama 70B at 4 requests/s on the machines of Helix's cluster.

    Promises are Helix's median latencies online. Lengths are the means of its trace, 763 and 232 tokens, with
    a standard deviation equal to the mean.
    """
    offers = "".join(
        f"    - {{region: aws/us-east-2, node_type: {kind!r}, available: {count}, usd_per_hour: {usd}}}\n"
        for kind, (count, usd) in HELIX_POOL.items()
    )
    found = parse_fleet(
        "services:\n  llama: {model: llama-2-70b, ttft: 2090ms, tpot: 730ms, rate: 4/s, phases: apart, "
        "lengths: {input: 763, output: 232, input_cv: 1, output_cv: 1}}\n"
        f"pool:\n  offers:\n{offers}settings: {{max_nodes_per_instance: 6, memory_ratio: 12}}\n"
    )
    return _as_in_the_paper(found.replace(name="coral-helix"))


def many_models(problem: Problem, copies: int, available: int = 512) -> Problem:
    """Return a problem with every service so many times, each with a rate of its own."""
    rng = np.random.default_rng(copies)
    services = tuple(
        s.model_copy(
            update={
                "name": f"{s.name}-{i}",
                "rate_per_s": round(s.rate_per_s * float(rng.uniform(0.3, 1.7)), 3),
            }
        )
        for s in problem.services
        for i in range(copies)
    )
    offers = tuple(o.model_copy(update={"available": available}) for o in problem.offers)
    return problem.replace(
        name=f"{problem.name}-{len(services)}-models", services=services, offers=offers
    )


def many_regions(problem: Problem, regions: int, available: int = 64) -> Problem:
    """Return a problem with all of its node types in so many regions, at prices of their own."""
    rng = np.random.default_rng(regions)
    cheapest: dict[str, Offer] = {}
    for offer in problem.offers:
        known = cheapest.get(offer.node_type)
        if known is None or offer.usd_per_hour < known.usd_per_hour:
            cheapest[offer.node_type] = offer
    offers = []
    for index in range(regions):
        factor = float(rng.uniform(0.9, 1.4))
        for offer in cheapest.values():
            usd = round(offer.usd_per_hour * factor * float(rng.uniform(0.95, 1.05)), 4)
            update = {"region": f"r/{index:02d}", "available": available, "usd_per_hour": usd}
            offers.append(offer.model_copy(update=update))
    return problem.replace(name=f"{problem.name}-{regions}-regions", offers=tuple(offers))


def with_rates(problem: Problem, rates: dict[str, float]) -> Problem:
    """Return a problem with other requests/s for some services."""
    services = tuple(
        s.model_copy(update={"rate_per_s": rates.get(s.name, s.rate_per_s)})
        for s in problem.services
    )
    return problem.replace(services=services)


def scaled(problem: Problem, fraction: float) -> Problem:
    """Return a problem with all demands scaled."""
    return with_rates(problem, {s.name: s.rate_per_s * fraction for s in problem.services})


def heavy(problem: Problem, favoured: tuple[str, ...]) -> Problem:
    """Return a problem whose `favoured` services get 80 % of all requests, shared equally."""
    total = sum(s.rate_per_s for s in problem.services)
    others = len(problem.services) - len(favoured)
    rates = {
        s.name: 0.8 * total / len(favoured) if s.name in favoured else 0.2 * total / others
        for s in problem.services
    }
    return with_rates(problem, rates)


# Scarcity: GPUs by type and by node size, in shares of all GPUs there are. The mix is not the mix that a
# cheapest plan would choose, as in a cluster that was bought before the models were known.
_CORE_MIX = {"L40S": 0.40, "L4": 0.30, "A10G": 0.30}
_EXTENDED_MIX = {"L40S": 0.30, "L4": 0.20, "A10G": 0.15, "A100-80": 0.20, "H100": 0.15}
_SIZES = {1: 0.4, 2: 0.2, 4: 0.2, 8: 0.2}


def scarce(problem: Problem, memory_needed: float, margin: float) -> Problem:
    """Return a problem whose pool holds `margin` times the GPU memory that its cheapest plan uses.

    `memory_needed` is that plan's GPU memory in bytes; GPUs are spread over types, sizes and regions.
    """
    catalog = Catalog.default()
    mix = _CORE_MIX if problem.name.startswith("coral-core") else _EXTENDED_MIX
    available: dict[tuple[str, str], int] = {}
    for gpu, share in mix.items():
        memory = catalog.gpu(gpu).memory_bytes
        for count, part in _SIZES.items():
            regions = [o.region for o in problem.offers if o.node_type == f"{gpu}:{count}"]
            nodes = memory_needed * margin * share * part / (memory * count)
            for index, region in enumerate(regions):
                # Whole nodes, the remainder to the first regions.
                available[region, f"{gpu}:{count}"] = int(
                    (nodes + len(regions) - 1 - index) // len(regions)
                )
    offers = tuple(
        o.model_copy(update={"available": available.get((o.region, o.node_type), 0)})
        for o in problem.offers
    )
    return problem.replace(name=f"{problem.name}-scarce", offers=offers)

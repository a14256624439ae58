"""The set-ups of the Coral paper (table 3 and section 6.1) as problems, with today's real prices.

Core: three models on L40S, L4 and A10G nodes in two AWS regions, 10 requests/s each. Extended: six models,
A100-80 and H100 nodes and a GCP region as well, 25 requests/s each. Sizes that a cloud does not sell have
pro-rata prices, as the paper's grid of 1, 2, 4 and 8 GPUs needs them; A100-80 is sold in GCP's region
only. BurstGPT's lengths are taken as azure-conv.
"""

from __future__ import annotations

from atoll.catalog import Catalog
from atoll.plan.problem import Lengths, Offer, Problem, Service, Settings
from atoll.workload.lengths import length_mix

MODELS: dict[str, tuple[float, float, str]] = {
    "phi-4-14b": (1.2, 0.060, "azure-conv"),
    "gpt-oss-20b": (0.9, 0.030, "azure-code"),
    "qwen3-32b": (1.6, 0.100, "azure-conv"),
    "llama-3-70b": (1.5, 0.080, "azure-conv"),
    "gpt-oss-120b": (1.0, 0.040, "azure-conv"),
    "qwen3-235b-a22b": (1.8, 0.120, "azure-code"),
}
CORE_MODELS = ("phi-4-14b", "gpt-oss-20b", "qwen3-32b")
CORE_GPUS = ("L40S", "L4", "A10G")
CORE_REGIONS = ("aws/us-east-2", "aws/ap-northeast-2")
EXTENDED_GPUS = (*CORE_GPUS, "A100-80", "H100")
EXTENDED_REGIONS = (*CORE_REGIONS, "gcp/us-central1")
PLENTY = 100


Available = dict[tuple[str, str], int]


def core(
    rates: dict[str, float] | None = None,
    *,
    available: Available | None = None,
    settings: Settings | None = None,
) -> Problem:
    """Return the core set-up; `rates` overrides requests/s per model, `available` nodes per region."""
    own = dict.fromkeys(CORE_MODELS, 10.0) | (rates or {})
    return _problem("coral-core", own, CORE_GPUS, CORE_REGIONS, available, settings)


def extended(
    rates: dict[str, float] | None = None,
    *,
    available: Available | None = None,
    settings: Settings | None = None,
) -> Problem:
    """Return the extended set-up; `rates` overrides requests/s per model, `available` as in `core`."""
    own = dict.fromkeys(MODELS, 25.0) | (rates or {})
    return _problem("coral-extended", own, EXTENDED_GPUS, EXTENDED_REGIONS, available, settings)


def _problem(
    name: str,
    rates: dict[str, float],
    gpus: tuple[str, ...],
    regions: tuple[str, ...],
    available: Available | None,
    settings: Settings | None,
) -> Problem:
    catalog = Catalog.default()
    services = []
    for model, rate in rates.items():
        ttft_s, tpot_s, mix = MODELS[model]
        services.append(
            Service(
                name=model,
                model=model,
                ttft_s=ttft_s,
                tpot_s=tpot_s,
                rate_per_s=rate,
                lengths=Lengths.of(length_mix(mix)),
            )
        )
    offers = []
    for region in regions:
        for gpu in gpus:
            for count in (1, 2, 4, 8):
                node = f"{gpu}:{count}"
                price = catalog.prices.cheapest(region, node, include_imputed=True)
                if price is None or price.usd_per_hour is None:
                    continue
                number = PLENTY if available is None else available.get((region, node), 0)
                offers.append(
                    Offer(
                        region=region,
                        node_type=node,
                        available=number,
                        usd_per_hour=price.usd_per_hour,
                        instance=price.instance,
                    )
                )
    return Problem(
        name=name,
        services=tuple(services),
        offers=tuple(offers),
        settings=settings or Settings(),
    )


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
    mix = _CORE_MIX if problem.name == "coral-core" else _EXTENDED_MIX
    available: Available = {}
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
    return problem.changed(name=f"{problem.name}-scarce", offers=offers)

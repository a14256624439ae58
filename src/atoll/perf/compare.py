"""Whole copies of a model on one kind of node: how many nodes, how fast, at what price.

A copy is an equal pipeline of S nodes of one type, the simplest thing a team would build by hand. It is
a yardstick to look at, not a plan: planners mix node types and cut layers unevenly.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from atoll.catalog.catalog import Catalog
from atoll.catalog.link_table import Link
from atoll.catalog.nodes import NodeType
from atoll.catalog.transformer import TransformerSpec
from atoll.core.ids import Phase
from atoll.engines.table import EngineChoice
from atoll.perf.capacity import CapacityTable, RoleLoad, table_of
from atoll.perf.layers import node_splits
from atoll.perf.memory_model import MemoryModel
from atoll.perf.step import Position, analytic
from atoll.workload.lengths import LengthMix

MAX_STAGES = 8


@dataclass(frozen=True, slots=True)
class Promise:
    """Latency promises of a model in seconds: first token, and each further token."""

    ttft_s: float
    tpot_s: float


@dataclass(frozen=True, slots=True)
class PhaseCopy:
    """The best equal pipeline for one phase: tokens/s and price per million tokens (None: no price).

    Every node splits its layers over `tp` GPUs and holds as many copies as that leaves room for.
    """

    nodes: int
    tp: int
    tokens_per_s: float
    usd_per_hour: float | None
    usd_per_million_tokens: float | None


@dataclass(frozen=True, slots=True)
class NodeChoice:
    """One node type for one model. A phase is None where no pipeline of up to 8 nodes keeps the promise."""

    node: str
    usd_per_hour: float | None
    region: str | None
    max_layers: int
    prefill: PhaseCopy | None
    decode: PhaseCopy | None
    request_usd: float | None
    provenance: str


def compare(
    spec: TransformerSpec,
    promise: Promise,
    lengths: LengthMix,
    nodes: Iterable[NodeType],
    catalog: Catalog,
    *,
    engine: str | EngineChoice = "vllm",
    regions: Sequence[str] | None = None,
    spot: bool = False,
    link: Link | None = None,
) -> list[NodeChoice]:
    """Return every node type with its best prefill and decode pipelines, cheapest per request first.

    The price is the lowest in `regions` (all if None); node types without a price sort last. Stages hand
    over through the nodes' own network interfaces unless `link` is given.
    """
    loads = {
        Phase.PREFILL: RoleLoad("prefill", spec, Phase.PREFILL, promise.ttft_s, lengths),
        Phase.DECODE: RoleLoad("decode", spec, Phase.DECODE, promise.tpot_s, lengths),
    }
    choices = []
    for node in nodes:
        price, region = _cheapest(catalog, node, regions, spot)
        hop = link if link is not None else catalog.links.between("", "", node.id, node.id)
        models = [analytic(spec, node, tp=tp, engine=engine) for tp in node_splits(spec, node)]
        best = {
            phase: _best_copy([table_of(load, m, MAX_STAGES, link=hop) for m in models], price)
            for phase, load in loads.items()
        }
        # Split over as many GPUs as can be, most layers fit.
        memory = MemoryModel.of(spec, node, tp=models[-1].tp, engine=models[-1].engine)
        choices.append(
            NodeChoice(
                node=node.id,
                usd_per_hour=price,
                region=region,
                max_layers=memory.max_layers(lengths.decode_context, Position.MIDDLE),
                prefill=best[Phase.PREFILL],
                decode=best[Phase.DECODE],
                request_usd=_request_usd(best[Phase.PREFILL], best[Phase.DECODE], lengths),
                provenance=models[-1].provenance,
            )
        )
    return sorted(choices, key=_order)


def _order(choice: NodeChoice) -> tuple[float, float, str]:
    served = choice.prefill is not None and choice.decode is not None
    usd = choice.request_usd if choice.request_usd is not None else math.inf
    return (usd, 0.0 if served else 1.0, choice.node)


def _cheapest(
    catalog: Catalog, node: NodeType, regions: Sequence[str] | None, spot: bool
) -> tuple[float | None, str | None]:
    offers = []
    for price in catalog.prices.query(gpu=node.gpu.name, count=node.count, spot=spot):
        usd = price.cost(spot=spot)
        if usd is not None and (regions is None or any(map(price.is_in, regions))):
            offers.append((usd, price.place))
    return min(offers) if offers else (None, None)


def _best_copy(tables: Sequence[CapacityTable], price: float | None) -> PhaseCopy | None:
    """The split and stage count with the most tokens/s per node, each stage holding an equal share.

    `tables` are of one tensor-parallel size each, ascending; of equals the larger one is taken.
    """
    layers = tables[0].role.spec.layers
    best: PhaseCopy | None = None
    for stages in range(1, min(MAX_STAGES, layers) + 1):
        held = math.ceil(layers / stages)
        tokens, tp = max((table.at(held, stages), int(table.tp.flat[0])) for table in tables)
        if tokens <= 0.0 or (
            best is not None and tokens / stages <= best.tokens_per_s / best.nodes
        ):
            continue
        hourly = None if price is None else price * stages
        per_million = None if hourly is None else hourly / (tokens * 3600.0) * 1e6
        best = PhaseCopy(stages, tp, tokens, hourly, per_million)
    return best


def _request_usd(
    prefill: PhaseCopy | None, decode: PhaseCopy | None, lengths: LengthMix
) -> float | None:
    """Return the cost of one mean request in dollars with both phases fully busy."""
    if prefill is None or decode is None:
        return None
    if prefill.usd_per_million_tokens is None or decode.usd_per_million_tokens is None:
        return None
    return (
        prefill.usd_per_million_tokens * lengths.input_mean
        + decode.usd_per_million_tokens * lengths.output_mean
    ) * 1e-6

"""What one node carries of a service, counted the same way by every solver and by the validator.

A node with j layers in a pipeline of S stages gets SLO / S for its step and the hand-over to the
next stage. Prefill and decode capacities are those of `perf.capacity`, in tokens/s. Where both phases
run together a request takes input_mean / P + output_mean / D seconds of a node, so it carries

    R(j) = 1 / (input_mean / P(j) + output_mean / D(j))        requests/s

with P and D at budgets TTFT / S and TPOT / S. All of these never rise with j and never fall with a
looser promise, and in a pipeline none exceeds what the node's network interface hands over.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from atoll.catalog.catalog import Catalog
from atoll.catalog.links import Link
from atoll.catalog.nodes import NodeType
from atoll.core.ids import Phase, RoleId, parse_role
from atoll.perf.capacity import CapacityModel, CapacityTable, RoleLoad, table_of
from atoll.perf.engines import engine as engine_profile
from atoll.perf.memory import MemoryModel
from atoll.perf.operators import ACTIVATION_BYTES, Array
from atoll.perf.step import Position, analytic
from atoll.plan.problem import Problem, Service

POSITIONS = CapacityTable.POSITIONS
"""The order of the first axis of `role_table`."""


def hop_link(catalog: Catalog, node_type: str, region: str | None = None) -> Link:
    """Return the link a node of this type hands its activations over, inside a region.

    The next node is taken to have the same interface; without a region, an ordinary one is meant.
    """
    here = region or ""
    return catalog.links.between(here, here, node_type, node_type)


def phase_loads(catalog: Catalog, service: Service, role: RoleId | str) -> tuple[RoleLoad, ...]:
    """Return what the performance model must be asked for: one phase, or both of them."""
    role_id = parse_role(role) if isinstance(role, str) else role
    phases = (Phase.PREFILL, Phase.DECODE) if role_id.phase is Phase.BOTH else (role_id.phase,)
    spec = catalog.model(service.model).llm
    mix = service.lengths.mix()
    return tuple(
        RoleLoad(
            f"{service.name}/{role_id.component}/{phase}", spec, phase, service.slo_s(phase), mix
        )
        for phase in phases
    )


def tokens_per_unit(service: Service, phase: Phase) -> float:
    """Return how many tokens pass a hop for each unit of flow: one, or a whole request's."""
    lengths = service.lengths
    return lengths.input_mean + lengths.output_mean if phase is Phase.BOTH else 1.0


def hop_bytes_per_unit(catalog: Catalog, service: Service, phase: Phase) -> float:
    """Return the bytes of activations that a unit of flow hands from one stage to the next."""
    hidden = catalog.model(service.model).llm.hidden
    return hidden * ACTIVATION_BYTES * tokens_per_unit(service, phase)


def kv_context(service: Service, phase: Phase) -> float:
    """Return the tokens of KV cache that one request keeps on a node, on average."""
    mix = service.lengths.mix()
    return mix.input_mean if phase is Phase.PREFILL else mix.decode_context


def memory_model(
    problem: Problem, catalog: Catalog, service: Service, phase: Phase, node: NodeType, tp: int
) -> MemoryModel:
    """Return what fits on a node that runs this phase."""
    spec = catalog.model(service.model).llm
    engine = engine_profile(problem.settings.engine)
    return MemoryModel.of(spec, node, tp=tp, engine=engine, phase=phase)


@lru_cache(maxsize=4096)
def _model(
    load: RoleLoad, node: NodeType, tp: int | None, engine: str, link: Link
) -> CapacityModel:
    return CapacityModel(load, analytic(load.spec, node, tp=tp, engine=engine), link=link)


def node_capacity(
    problem: Problem,
    catalog: Catalog,
    service: Service,
    role: RoleId | str,
    node_type: str,
    layers: int,
    stages: int,
    position: Position,
    *,
    tp: int | None = None,
    region: str | None = None,
) -> float:
    """Return what a node carries with `layers` layers at `position` in a pipeline of `stages`.

    Prompt tokens/s, generated tokens/s, or requests/s where both phases run together; 0 where the
    layers do not fit or the promise cannot be kept. `tp` is `default_tp` unless given.
    """
    role_id = parse_role(role) if isinstance(role, str) else role
    node = catalog.node(node_type)
    link = hop_link(catalog, node_type, region)
    rates: list[float] = []
    for load in phase_loads(catalog, service, role_id):
        if not 1 <= layers <= load.spec.layers:
            return 0.0
        model = _model(load, node, tp, problem.settings.engine, link)
        rate = model.throughput([stages], [load.slo_s / stages], position)
        rates.append(float(rate[0, layers]))
    return rates[0] if len(rates) == 1 else float(_together(service, *map(np.float64, rates)))


def role_table(
    problem: Problem,
    catalog: Catalog,
    service: Service,
    role: RoleId | str,
    node_type: str,
    stages: int,
    *,
    region: str | None = None,
) -> Array:
    """Return `node_capacity` of every position, stage count and number of layers at once.

    Shape (4, stages, layers + 1): positions as in `POSITIONS` (first, middle, last, whole), S = 1..
    `stages`, j = 0..layers. Whole is for S = 1 only, the others for S >= 2; the rest is 0.
    """
    role_id = parse_role(role) if isinstance(role, str) else role
    node = catalog.node(node_type)
    link = hop_link(catalog, node_type, region)
    tables = [
        table_of(
            load,
            analytic(load.spec, node, engine=problem.settings.engine),
            stages,
            link=link,
        ).throughput
        for load in phase_loads(catalog, service, role_id)
    ]
    return tables[0] if len(tables) == 1 else np.asarray(_together(service, *tables))


def _together(
    service: Service, prefill: Array | np.float64, decode: Array | np.float64
) -> Array | np.float64:
    """Requests/s of a node that spends its time on both phases; 0 where either is 0."""
    with np.errstate(divide="ignore"):
        seconds = service.lengths.input_mean / prefill + service.lengths.output_mean / decode
        return np.asarray(1.0 / seconds)[()]

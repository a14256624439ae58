"""Layout and launch of an instance as engines ask for them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import pairwise
from typing import TYPE_CHECKING

from atoll.catalog.catalog import Catalog
from atoll.core.errors import AtollError
from atoll.core.ids import Phase, parse_node_type
from atoll.engines.engine import EngineLayout, Irregularity, platform_of
from atoll.engines.limits import EngineLaunch, Handover
from atoll.engines.table import find_engine, list_planned, profile_engine
from atoll.plan.plan import Instance, Node, Plan

if TYPE_CHECKING:
    from atoll.catalog.transformer import TransformerSpec
    from atoll.engines.engine import Engine, Standing

_BF16_CAPABILITY = 8.0
"""Compute capability from which GPUs compute in bf16, which most weights are in."""


def describe_engine(instance: Instance, catalog: Catalog) -> str | None:
    """Return which engine runs an instance, its tensor parallel size and standing: "vllm TP 2, tested"."""
    if instance.engine is None:
        return None
    engine = find_engine(instance.engine)
    standing = standing_of(engine, instance, catalog)
    sizes = sorted({node.tp for node in instance.nodes})
    word = "TP" if engine.splits_by == "tensor" else "layers over"
    split = f" {word} {'+'.join(map(str, sizes))}" if sizes != [1] else ""
    return f"{instance.engine}{split}, {standing}"


def standing_of(engine: Engine, instance: Instance, catalog: Catalog) -> Standing:
    """Return what is known of an engine in the layout of an instance, on its GPUs."""
    gpus = {catalog.node(node.kind).gpu.architecture for node in instance.nodes}
    return engine.standing(engine_layout(instance), gpus)


def describe_limits(instance: Instance, spec: TransformerSpec, catalog: Catalog) -> str:
    """Return which engines alone run an instance, and what of it others do not: "only atoll (vllm: ...)"."""
    limits = {e.name: list_limits(e, instance, spec, catalog) for e in list_planned()}
    able = " or ".join(name for name, lacks in limits.items() if not lacks)
    lacking = "; ".join(f"{name}: {', '.join(lacks)}" for name, lacks in limits.items() if lacks)
    if not lacking:
        return "any engine"
    return f"only {able} ({lacking})" if able else f"no engine ({lacking})"


def list_limits(
    engine: Engine, instance: Instance, spec: TransformerSpec, catalog: Catalog
) -> tuple[str, ...]:
    """Return what of an instance of a model an engine does not run: its layout, its nodes, its weights."""
    found = list(engine.list_limits(engine_layout(instance)))
    most = engine.max_node_copies
    if most is not None and any(node.gpus > most * node.tp for node in instance.nodes):
        found.append("several copies of the layers on the GPUs of a node")
    for kind in sorted(gpu_kinds(instance)):
        gpu = catalog.gpu(kind)
        if engine.refuses_hardware(gpu) is not None:
            found.append(f"an instance on {kind}")
        elif engine.refuses(spec, gpu) is not None:
            formats = sorted(
                {spec.attention_dtype.name, spec.mlp_dtype.name, spec.expert_dtype.name}
            )
            found.append(f"{' and '.join(formats)} weights on {kind}")
    return tuple(found)


def launch_of(plan: Plan, instance: Instance) -> EngineLaunch:
    """Return what the engine of an instance is started with: its service's limits, on its own GPUs."""
    launch = plan.engines.get(instance.service, EngineLaunch())
    own: dict[str, object] = {"handover": handover_of(plan.instances, instance)}
    own |= _share_limits(launch, instance)
    if instance.slots is not None:
        # A step has room for a token of each.
        tokens = launch.max_num_batched_tokens
        own["max_num_seqs"] = instance.slots
        own["max_num_batched_tokens"] = tokens and max(tokens, instance.slots)
        return launch.model_copy(update=own)
    if launch.dtype is None and any(_lacks_bf16(node) for node in instance.nodes):
        own["dtype"] = "fp16"
    return launch.model_copy(update=own)


def _share_limits(launch: EngineLaunch, instance: Instance) -> dict[str, object]:
    """Return what an engine is told of the memory of a GPU that it has a share of."""
    node = instance.nodes[0]
    if node.gpu_shares == 1 or instance.engine is None:
        return {}
    if find_engine(instance.engine).staged:
        return {}  # each node is told its own
    memory = profile_engine(instance.engine, None, launch).memory_share
    # Rounded down: all shares together take no more than one engine alone.
    part = math.floor(1e4 * memory / node.gpu_shares) / 1e4
    return {"gpu_memory_utilization": part, "kv_bytes": node.kv_bytes}


def handover_of(instances: Iterable[Instance], instance: Instance) -> Handover | None:
    """Return how an instance hands KV cache over or takes it, among all; None: it runs both phases."""
    engine = None if instance.engine is None else find_engine(instance.engine)
    if engine is None or engine.connector is None or engine.staged:
        return None
    piped = engine.connector.pushes and any(
        one.service == instance.service and one.phase is Phase.PREFILL and len(one.layout()) > 1
        for one in instances
    )
    if instance.phase is Phase.PREFILL:
        return "prefill-push" if piped else "prefill"
    if instance.phase is Phase.DECODE:
        return "decode-push" if piped else "decode"
    return None


def _lacks_bf16(node: Node) -> bool:
    try:
        gpu = Catalog.default().gpu(parse_node_type(node.node_type).gpu)
    except AtollError:  # of a fleet file's own catalog, which is not at hand
        return False
    return platform_of(gpu)[1] < _BF16_CAPABILITY


def gpu_kinds(instance: Instance) -> frozenset[str]:
    """Return the kinds of GPUs that an instance stands on."""
    return frozenset(parse_node_type(node.node_type).gpu for node in instance.nodes)


def engine_layout(instance: Instance) -> EngineLayout:
    """Return the nodes and layers of an instance, and what is irregular about them."""
    stages, first = instance.layout(), instance.nodes[0]
    found = {
        Irregularity.PARTIAL: instance.partial,
        Irregularity.WIDE_STAGE: any(len(stage.nodes) > 1 for stage in stages),
        Irregularity.UNLIKE_NODES: len({(node.gpus, node.tp) for node in instance.nodes}) > 1,
        Irregularity.OVERLAP: any(a.end != b.start for a, b in pairwise(stages)),
        Irregularity.COPIES: len(instance.nodes) > 1 and first.gpus > first.tp,
        Irregularity.SHARES: len(instance.nodes) > 1
        and any(node.gpu_shares > 1 for node in instance.nodes),
    }
    return EngineLayout(
        instance=instance.id,
        nodes=len(instance.nodes),
        tp=first.tp,
        copies=first.gpus // first.tp,
        layers=tuple(stage.end - stage.start for stage in stages),
        irregularities=tuple(each for each, holds in found.items() if holds),
        phase=instance.phase,
        on_share=any(node.gpu_shares > 1 for node in instance.nodes),
    )

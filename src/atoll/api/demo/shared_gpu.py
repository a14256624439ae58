"""A plan for cores on a GPU of this machine, of which every node has a share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from atoll.api.fleet_plan import FleetPlan
from atoll.catalog.catalog import Catalog
from atoll.core.ids import format_node_type, parse_node_type
from atoll.engines.limits import EngineLaunch
from atoll.engines.stage import ENGINE as STAGE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from atoll.deploy.local.gpu_slots import PoolMachine
    from atoll.runtime.local.instance_runner import InstanceRunner

_KV_BYTES = 128 * 2**20
"""For each node, as on cores."""
_LAUNCH = EngineLaunch(dtype="fp32", max_num_seqs=16, max_num_batched_tokens=512)
"""Small steps: whoever watches waits for all that are made ready before the first."""


def share_gpu(plan: FleetPlan, machines: Sequence[PoolMachine]) -> FleetPlan:
    """Return the plan with its nodes on equal shares of GPUs that the stage engine runs on, if any is here.

    It computes in fp32, as on cores: who compares answers letter by letter must get the same ones.
    """
    known = Catalog.default().gpus
    kinds = [parse_node_type(machine.node_type).gpu for machine in machines]
    able = [k for k in kinds if k in known and STAGE.refuses_hardware(known[k]) is None]
    if not able:
        return plan
    shares = max(len(instance.nodes) for instance in plan.instances)
    share = {"node_type": format_node_type(f"{able[0]}/{shares}", 1), "kv_bytes": _KV_BYTES}
    instances = tuple(
        instance.model_copy(
            update={
                "engine": STAGE.name,
                "nodes": tuple(
                    node.model_copy(update={**share, "host": None}) for node in instance.nodes
                ),
            }
        )
        for instance in plan.instances
    )
    exact = {one.service: _LAUNCH for one in instances}
    moved = plan.model_copy(update={"instances": instances, "engines": {**plan.engines, **exact}})
    return FleetPlan.of(moved, plan.problem)


def describe_device(runners: Sequence[InstanceRunner]) -> str:
    """Say in a line what the processes of instances compute on."""
    gpus = sorted({(one.gpu.partition("/")[0], gpu) for one in runners for gpu in one.gpus})
    if gpus:
        named = ", ".join(f"{kind} (GPU {gpu})" for kind, gpu in gpus)
        return f"they compute on {named} of this machine and share its memory"
    why = next((f", because {one.reason}" for one in runners if one.reason), "")
    return f"they compute on CPU cores{why}"

"""The line of a vLLM-Omni server that is all executors of an any-to-any service."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from atoll.core.errors import InputError
from atoll.core.ids import parse_node_type
from atoll.engines.engine import ServedModel, ServerHost
from atoll.engines.vllm_omni import ENGINE as OMNI
from atoll.engines.vllm_omni import OmniExecutor
from atoll.perf.components.component_shapes import component_weight_bytes
from atoll.runtime.endpoints.devices import assign_devices

if TYPE_CHECKING:
    from atoll.catalog.catalog import Catalog
    from atoll.plan.plan import Instance, Plan

_PLANNED_SHARE = 0.9
"""Of a GPU's memory, or of a share of it, that plans reckon with."""


def omni_line(
    plan: Plan, service: str, source: str, catalog: Catalog, port: int
) -> tuple[str, str]:
    """Return the machine and the line for a service; InputError where vLLM-Omni has no such split."""
    model = plan.models.get(service)
    if model is None:
        raise InputError(f"the plan does not say which model {service} is", field="models")
    executors = [
        _executor(each, model, catalog)
        for each in plan.executor_instances
        if each.service == service
    ]
    deployment = OMNI.deploy(model, executors)
    command = OMNI.serve(
        deployment, ServedModel(source, (service,)), ServerHost(str(port), "python3")
    )
    set_here = [f"{name}={shlex.quote(value)}" for name, value in command.environment.items()]
    return deployment.machine, " ".join([*set_here, shlex.join(command.arguments)])


def _executor(instance: Instance, model: str, catalog: Catalog) -> OmniExecutor:
    (node,) = instance.nodes
    placed = assign_devices(instance, node)
    spec = catalog.model(model)
    memory = catalog.gpu(parse_node_type(node.node_type).gpu).whole.memory_bytes
    names = {part: part.partition(".")[0] for part in instance.parts}
    return OmniExecutor(
        instance.id,
        instance.parts,
        placed.machine,
        tuple(gpu for copy in placed.copies for gpu in copy),
        node.tp,
        _PLANNED_SHARE / node.gpu_shares,
        {
            part: component_weight_bytes(spec, name) / node.tp / memory
            for part, name in names.items()
        },
    )

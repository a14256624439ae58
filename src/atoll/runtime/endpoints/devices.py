"""Where a node of a plan runs: which machine, and which GPUs it may see there.

For whoever starts processes, here or through Slurm or Kubernetes: nodes with the same machine name belong on
one machine, and `CUDA_VISIBLE_DEVICES` keeps each to its own GPUs there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from atoll.plan.plan import Instance, Node

VISIBLE = "CUDA_VISIBLE_DEVICES"
_ORDER = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
"""Has CUDA count GPUs as their driver does; by itself it begins with the fastest."""


@dataclass(frozen=True, slots=True)
class DeviceAssignment:
    """A machine's name, what to set in the environment there, and the GPUs of each copy of the layers.

    Copies stand side by side, each split over the node's `tp` GPUs. GPUs are counted as the machine counts
    them; a process that sees only its own counts them from 0, in this order.
    """

    machine: str
    environment: dict[str, str]
    copies: tuple[tuple[int, ...], ...]


def assign_devices(instance: Instance, node: Node) -> DeviceAssignment:
    """Return where a node of an instance runs.

    The machine is the host of a fixed cluster; else the offer and the slot, "us-east-1/H100:8/spot/2", or,
    where a machine is not shared, the offer and the node itself. A node that has a whole machine sees all of
    it: nothing is set.
    """
    named = range(node.gpus) if node.gpu_ids is None else node.gpu_ids
    ids = tuple(gpu // node.gpu_shares for gpu in named)
    slot = f"{instance.id}.{node.id}" if node.slot is None else str(node.slot)
    offer = f"{instance.region_of(node)}/{node.node_type}/{node.market}"
    return DeviceAssignment(
        machine=node.host or f"{offer}/{slot}",
        environment=visible_gpus([node]),
        copies=tuple(ids[at : at + node.tp] for at in range(0, len(ids), node.tp)),
    )


def visible_gpus(nodes: Iterable[Node]) -> dict[str, str]:
    """Return what to set for one process over nodes on one machine; nothing where one has all of it.

    Of a GPU in shares the plan counts these, the driver the GPU.
    """
    ids: list[int] = []
    for node in nodes:
        if node.gpu_ids is None:
            return {}
        ids += [gpu // node.gpu_shares for gpu in node.gpu_ids]
    return {VISIBLE: ",".join(map(str, dict.fromkeys(ids)))}


def show_gpus(numbers: Sequence[int]) -> dict[str, str]:
    """Return what to set so that a process sees GPUs of this machine, by the driver's numbers."""
    return {VISIBLE: ",".join(map(str, numbers)), **_ORDER}


def show_nodes(nodes: Iterable[Node]) -> dict[str, str]:
    """Return what to set for a process over nodes on this machine; see `visible_gpus`."""
    shown = visible_gpus(nodes)
    return shown | _ORDER if shown else {}

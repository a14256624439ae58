"""Prefill instances that help decode instances: how they say what they are, and how they are found.

A decode instance listens and joins the fabric as itself. Prefill instances serve nobody directly: each of
their nodes says in the meeting of its pool (one for each service of a fleet) which layers it holds and where
it is reached. The leading node of every decode instance follows that, and has its engine compute prompts over
whatever prefill instances are whole just now, or by itself where there are none.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from pydantic import Field

from atoll.core.errors import InputError
from atoll.core.frozen import Frozen
from atoll.core.ids import Phase, RoleId
from atoll.deploy.commands.meeting import MemberAddress
from atoll.plan.plan import SINK, SOURCE, Flow, Instance, Node
from atoll.runtime.instance.instance_config import InstanceHelpers, InstancePart
from atoll.runtime.local.placing import LLM

MAX_LABEL = 256
"""Characters that fit into a label of the fabric."""
_KIND = "GPU:1"
_REGION = "pool"
"""Placeholders: type and place of a machine do not matter to whoever sends it prompts."""


class PrefillOffer(Frozen):
    """Announcement of one node of a prefill instance: its instance, its layers, and where flow goes.

    `part` is the instance's name in its fleet, `enter_per_s` the flow from the source, `out` that to others.
    """

    part: str = Field(min_length=1)
    of: int = Field(ge=1)
    start: int = Field(ge=0)
    end: int = Field(ge=1)
    enter_per_s: float = 0.0
    out: dict[str, float] = Field(default_factory=dict)


def offer_of(instance: Instance, node: Node) -> PrefillOffer:
    """Return what a node of a prefill instance says; its engine has the instance's name, as in the fleet."""
    offer = PrefillOffer(
        part=instance.id,
        of=len(instance.nodes),
        start=node.start,
        end=node.end,
        enter_per_s=_round(
            sum(f.per_s for f in instance.flows if (f.src, f.dst) == (SOURCE, node.id))
        ),
        out={flow.dst: _round(flow.per_s) for flow in instance.flows if flow.src == node.id},
    )
    if len(offer.to_json()) > MAX_LABEL:
        raise InputError(
            f"node {node.id} of {instance.id} has too many neighbours to be named in a fabric",
            field="phases",
            hint="plan with fewer nodes in a stage, or with 'phases: together'",
        )
    return offer


def _round(per_s: float) -> float:
    return float(f"{per_s:.6g}")


def assemble_helpers(
    service: str, found: Iterable[tuple[str, PrefillOffer, MemberAddress]]
) -> InstanceHelpers:
    """Return the prefill instances of which all nodes are there; `found` has each node's id first."""
    by_part: dict[str, dict[str, tuple[PrefillOffer, MemberAddress]]] = {}
    for node, offer, address in found:
        by_part.setdefault(offer.part, {})[node] = (offer, address)
    parts = [
        part
        for name, nodes in sorted(by_part.items())
        if (part := _assemble(service, name, nodes)) is not None
    ]
    return InstanceHelpers(parts=tuple(parts))


def _assemble(
    service: str, name: str, found: Mapping[str, tuple[PrefillOffer, MemberAddress]]
) -> InstancePart | None:
    if {offer.of for offer, _ in found.values()} != {len(found)}:
        return None
    nodes = tuple(
        Node(id=node, node_type=_KIND, market="owned", start=offer.start, end=offer.end, tp=1)
        for node, (offer, _) in sorted(found.items(), key=lambda one: int(one[0][1:]))
    )
    flows = [
        Flow(src=SOURCE, dst=node, per_s=offer.enter_per_s)
        for node, (offer, _) in sorted(found.items())
        if offer.enter_per_s > 0.0
    ]
    flows += [
        Flow(src=node, dst=dst, per_s=per_s)
        for node, (offer, _) in sorted(found.items())
        for dst, per_s in sorted(offer.out.items())
        if dst == SINK or dst in found
    ]
    instance = Instance(
        id=name,
        service=service,
        role=str(RoleId(service, LLM, Phase.PREFILL)),
        region=_REGION,
        stages=1,
        nodes=nodes,
        flows=tuple(flows),
        throughput_per_s=sum(flow.per_s for flow in flows if flow.src == SOURCE),
        usd_per_hour=0.0,
    )
    inboxes = {node: address.endpoint() for node, (_, address) in found.items()}
    return InstancePart(instance=instance, inboxes=inboxes)

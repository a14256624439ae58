"""Orders to bring instances up, as a controller gives them."""

from __future__ import annotations

from itertools import pairwise

from atoll.deploy.labels import Labels
from atoll.deploy.node_command import NodeCommand
from atoll.deploy.target import StartOrder
from atoll.plan.plan import SINK, SOURCE, Flow, Instance, Market, Node


def build_order(
    instance: str = "chat-0",
    *,
    types: tuple[str, ...] = ("L4:1",),
    market: Market = "owned",
    region: str = "cluster",
    fleet: str = "lab",
    plan: str = "p1",
    term: int = 0,
    argv: tuple[str, ...] = ("atoll", "join", "--", "engine", "--port", "{port}"),
    env: tuple[tuple[str, str], ...] = (),
    secrets: tuple[tuple[str, str], ...] = (),
    host: str | None = None,
    gpus: int | None = None,
    ready_s: float = 600.0,
) -> StartOrder:
    """Return an order of one node of each type, in a row."""
    nodes = tuple(
        Node(
            id=f"n{i}",
            node_type=kind,
            market=market,
            start=i,
            end=i + 1,
            tp=1,
            host=host,
        )
        for i, kind in enumerate(types)
    )
    ids = [SOURCE, *(node.id for node in nodes), SINK]
    planned = Instance(
        id="chat-0",
        service="chat",
        role="qwen3-8b/llm/both",
        region=region,
        stages=len(nodes),
        nodes=nodes,
        flows=tuple(Flow(src=a, dst=b, per_s=1.0) for a, b in pairwise(ids)),
        throughput_per_s=1.0,
        usd_per_hour=1.0,
    )
    commands = tuple(
        NodeCommand(
            node=node.id,
            node_type=node.node_type,
            argv=argv,
            gpus=node.gpus if gpus is None else gpus,
            env=env,
            secrets=secrets,
        )
        for node in nodes
    )
    labels = Labels(
        fleet=fleet,
        instance=instance,
        plan=plan,
        placement="a1",
        service="chat",
        role="qwen3-8b/llm/both",
        term=term,
    )
    return StartOrder(planned, labels, commands, ready_s)

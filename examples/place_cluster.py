"""A fixed cluster: which machine holds which layers, and what that serves under load.

python examples/place_cluster.py
"""

from __future__ import annotations

from pathlib import Path

from atoll import Effort, Fleet

HERE = Path(__file__).resolve().parent


def main() -> None:
    """Place a 64-layer model on 14 unlike machines at two sites, and simulate it."""
    fleet = Fleet.load(HERE / "cluster-mixed.yaml")
    plan = fleet.plan(
        effort=Effort(objective="max-flow"), deadline_s=3, rank=False, capacity_only=True
    )
    for instance in plan.instances:
        for node in sorted(instance.nodes, key=lambda node: (node.start, node.end)):
            print(f"layers {node.start:2} to {node.end - 1:2}  {node.host:14} {node.node_type}")
    print(
        f"carries {plan.objective:,.0f} tokens/s; no placement carries more than {plan.bound:,.0f}"
    )

    report = plan.simulate("azure-conv@0.2/s model=chat for=5min", seed=1)
    print(report)


if __name__ == "__main__":
    main()

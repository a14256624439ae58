"""Two questions about a fleet: what would simpler rules cost, and what if a GPU became dearer?

python examples/what_if.py
"""

from __future__ import annotations

from pathlib import Path

from atoll import Fleet

HERE = Path(__file__).resolve().parent


def reprice(fleet: Fleet, gpu: str, factor: float) -> Fleet:
    """Return the fleet with every node of one GPU type `factor` times as expensive."""
    offers = [
        offer.model_copy(update={"usd_per_hour": offer.usd_per_hour * factor})
        if offer.node_type.startswith(f"{gpu}:")
        else offer
        for offer in fleet.problem.offers
    ]
    return Fleet(fleet.problem.replace(offers=offers))


def main() -> None:
    """Compare solvers on the quickstart fleet, then plan it with dearer L40S."""
    fleet = Fleet.load(HERE / "quickstart.yaml")
    plan = fleet.plan(deadline_s=300, capacity_only=True)
    print(f"{'solver':22}{'$/h':>8}{'ratio':>8}")
    print(f"{plan.solver:22}{plan.usd_per_hour:8.2f}{1:8.2f}")
    for other in fleet.compare(plan):
        cost, ratio = other.usd_per_hour, other.ratio
        if cost is None or ratio is None:
            print(f"{other.solver:22} does not serve the same: {', '.join(other.broken) or '-'}")
        else:
            print(f"{other.solver:22}{cost:8.2f}{ratio:8.2f}")

    print("\nIf every L40S cost twice as much:")
    dearer = reprice(fleet, "L40S", 2.0).plan(deadline_s=300, capacity_only=True)
    print(plan.diff(dearer))


if __name__ == "__main__":
    main()

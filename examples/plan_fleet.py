"""From a fleet file to a plan: what to rent, what it costs, how good that is proven to be, and why.

python examples/plan_fleet.py [FLEET.yaml]
"""

from __future__ import annotations

import sys
from pathlib import Path

from atoll import Fleet

HERE = Path(__file__).resolve().parent


def main() -> None:
    """Plan a fleet, by default the quickstart, and say why the plan is what it is."""
    fleet = Fleet.load(sys.argv[1] if len(sys.argv) > 1 else HERE / "quickstart.yaml")
    # Sized by simulation, so that 95 % of requests keep their promises: here, in some ten seconds.
    plan = fleet.plan(deadline_s=300)
    print(plan)

    # The validator knows no solver; a plan that breaks a rule raises InvalidPlanError.
    plan.validate()

    # Every figure is the difference between two plans: nothing here is an estimate.
    print(plan.explain(node_types=["L40S:4", "A10G:8"], deadline_s=300))


if __name__ == "__main__":
    main()

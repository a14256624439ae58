"""Build a fleet of typed objects, plan it, and with --serve try the plan with a small model on this machine.

python examples/build_fleet.py
python examples/build_fleet.py --serve
"""

from __future__ import annotations

import sys

from atoll import Fleet, LimitsSpec, PoolSpec, ServeOptions, ServiceSpec


def build() -> Fleet:
    """Return a chat service on machines of one's own; times in seconds, demand in requests/s."""
    chat = ServiceSpec(
        model="llama-3.1-8b",
        ttft=1.5,
        tpot=0.08,
        rate=1.0,
        lengths="512x128",
        phases="together",
    )
    pool = PoolSpec(owned={"here": {"L4:1": 4}})
    return Fleet.of("lab", {"chat": chat}, pool=pool, limits=LimitsSpec(max_nodes=4))


def main() -> None:
    """Plan the fleet, and serve it where that is asked for."""
    plan = build().plan(capacity_only=True)
    plan.validate()
    print(plan)
    if "--serve" in sys.argv[1:]:
        with plan.serve(ServeOptions(stand_in=True, port=0)) as served:
            input(f"{served.url}/v1 answers; Enter stops it ")


if __name__ == "__main__":
    main()

"""Plans that must survive, held against everything small that could be done instead.

Random small fleets are planned, and other plans are found for them without any solver. Families of cases, in
turn by seed (`FAMILIES`): losses of machines and places (`survive_losses`), services that share instances
(`survive_shares`), spot nodes that are lost (`survive_spot`), any-to-any services on slow links
(`survive_links`), fleets that are too small for their demand (`survive_shortage`).

does_not_survive    a loss that is to be survived leaves too little, by capacity or in simulation
dearer              a plan more than 2 % cheaper survives as well, by capacity
bound_false         a plan that survives costs less than the bound says
refused_wrongly     no plan, or a partial one, where one survives
sharer_below, spot_below, link_false, shortage_below
                    as the families of shares, spot, links and shortage count them
price_of_surviving_median   how much dearer than the plain plan, as a share
cpu_s_median        CPU-seconds over those of the plain plan

With `--results FILE` a case is written there as it ends and not run again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

import numpy as np

from benchmarks.report import Figure
from tests.slow.plans import (
    survive_links,
    survive_losses,
    survive_picture,
    survive_shares,
    survive_shortage,
    survive_spot,
)
from tests.slow.plans.case_runs import CaseCounts, case_options, run_cases
from tests.slow.plans.survive_outcome import FAULTS, Outcome
from tests.slow.verdict import conclude

FAMILIES: dict[str, tuple[Callable[[int], Outcome], tuple[str, ...]]] = {
    "loss": (
        survive_losses.run_case,
        ("does_not_survive", "dearer", "bound_false", "refused_wrongly"),
    ),
    "sharer": (survive_shares.run_case, ("sharer_below",)),
    "spot": (survive_spot.run_case, ("spot_below", "dearer", "refused_wrongly")),
    "link": (survive_links.run_case, ("link_false",)),
    "shortage": (survive_shortage.run_case, ("shortage_below",)),
}
"""By name what runs a case, and the faults that it counts. Others are not run."""
COUNTS = CaseCounts(full=200, quick=6, quick_s=120.0)


def kind_of(seed: int) -> str:
    """Return which family a seed is of."""
    return tuple(FAMILIES)[seed % len(FAMILIES)]


def run_case(seed: int) -> Outcome:
    """Run the case of a seed."""
    return FAMILIES[kind_of(seed)][0](seed)


def figures(outcomes: Mapping[int, Outcome]) -> list[Figure]:
    """Return the figures of some cases; faults that no family counts are not run."""
    counts = Counter(name for one in outcomes.values() for name in one.faults)
    counted = {
        name for kind in {one.kind for one in outcomes.values()} for name in FAMILIES[kind][1]
    }
    prices = [one.price for one in outcomes.values() if one.price is not None]
    ratios = [
        one.cpu_s / one.plain_cpu_s
        for one in outcomes.values()
        if one.cpu_s is not None and one.plain_cpu_s and one.price is not None
    ]
    return [
        Figure("cases", len(outcomes), note="bar: at least 200 in a full run"),
        *(Figure(name, counts[name] if name in counted else None, 0) for name in FAULTS),
        Figure("price_of_surviving_median", float(np.median(prices)) if prices else None),
        Figure("cpu_s_median", float(np.median(ratios)) if ratios else None, 2),
        Figure("not_enumerated", sum(not one.enumerated for one in outcomes.values())),
    ]


def main() -> None:
    """Run cases, those that are known left out, and print what was found."""
    options = case_options(__doc__ or "")
    options.add_argument(
        "--picture", action="store_true", help="draw docs/img/loss.svg, and no more"
    )
    chosen = options.parse_args()
    if chosen.picture:
        survive_picture.draw()
        return
    print("   seed kind        plan            $/h    bound  dearer CPU-s")

    def row(one: Outcome) -> str:
        price, cpu = ("-" if x is None else f"{x:.3f}" for x in (one.price, one.cpu_s))
        return f"{price:>7s} {cpu}"

    conclude(figures(run_cases(chosen, COUNTS, Outcome, run_case, row)))


if __name__ == "__main__":
    main()

"""Which model of a choice answers how much of it, while a fleet is operated.

A plan says so once, and gateways deal by it. What is operated is the fleet that the shares leave: plain
services, whose demand is counted as it is dealt. Shares stay until somebody plans the fleet anew, or its file
says something else of its choices.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from atoll.control.decision.decide import MakePlan
from atoll.core.errors import InfeasibleError
from atoll.plan.choice import Choice, ModelMix, levels_of
from atoll.plan.problem import Problem

_ROUNDING = 1e-6


class MixKeeper:
    """Keeps the mixes of a fleet's choices; `plan` is asked for others where the known ones do not fit."""

    def __init__(self, known: Iterable[ModelMix], plan: MakePlan) -> None:
        self.mixes = tuple(known)
        self._plan = plan

    def settle(self, problem: Problem) -> Problem:
        """Return the problem of plain services that the mixes leave."""
        if not problem.choices:
            self.mixes = ()
            return problem
        fitting = fit_mixes(problem.choices, self.mixes)
        if fitting is None:
            fitting = self._plan(problem).mixes
            if {mix.name for mix in fitting} != {choice.name for choice in problem.choices}:
                raise InfeasibleError(
                    f"no plan says which models answer for {problem.name}",
                    hint="`atoll plan` says why; allow more error, or give it more machines",
                )
        self.mixes = fitting
        return problem.settled(fitting)


def fit_mixes(choices: Sequence[Choice], mixes: Sequence[ModelMix]) -> tuple[ModelMix, ...] | None:
    """Return mixes as these choices have them, None where they are not for these, or break their rules."""
    if {mix.name for mix in mixes} != {choice.name for choice in choices}:
        return None
    levels = levels_of(mixes)
    known = {mix.name: mix for mix in mixes}
    found = []
    for choice in choices:
        before = known[choice.name]
        models = {variant.service: variant.model for variant in choice.variants}
        if any(models.get(service) != model for service, model in before.models.items()):
            return None
        mine = sum(levels.get(service, 0.0) for service in models)
        if (
            abs(mine - 1.0) > _ROUNDING
        ):  # a way that another choice uses would have to serve this one too
            return None
        mix = ModelMix.of(choice, levels, before.usd_per_point)
        if choice.max_error is not None and mix.error > choice.max_error + _ROUNDING:
            return None
        shares = mix.model_shares
        if any(shares.get(m, 0.0) < least - _ROUNDING for m, least in choice.min_share.items()):
            return None
        found.append(mix)
    return tuple(found)

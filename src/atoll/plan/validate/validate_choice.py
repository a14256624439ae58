"""Whether the mixes of a plan are what its problem asks for: every choice answered, errors and floors kept.

Written from the conditions alone; knows no solver.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from atoll.plan.choice import SHARE_TOLERANCE, Choice, ModelMix
from atoll.plan.plan import Plan
from atoll.plan.problem import Problem
from atoll.plan.validate.violation import Violation, violation


def check_mixes(plan: Plan, problem: Problem) -> Iterator[Violation]:
    """Yield what is wrong with the mixes of a plan for a problem with choices."""
    by_name: dict[str, ModelMix] = {}
    known = {choice.name for choice in problem.choices}
    for mix in plan.mixes:
        if mix.name in by_name:
            yield violation("mix", mix.name, "is mixed twice")
        if mix.name not in known:
            yield violation("mix", mix.name, "is no choice of the problem")
        by_name[mix.name] = mix
    for choice in problem.choices:
        if choice.name not in by_name:
            yield violation("mix", choice.name, "no model answers it")
            continue
        yield from _check_mix(by_name[choice.name], choice)
    yield from _check_shared([m for m in by_name.values() if m.name in known], problem.choices)


def _check_mix(mix: ModelMix, choice: Choice) -> Iterator[Violation]:
    variants = {variant.service: variant for variant in choice.variants}
    strangers = [service for service in mix.shares if service not in variants]
    for service in strangers:
        yield violation("mix", choice.name, f"{service} is none of its services")
    if strangers:
        return
    total = sum(mix.shares.values())
    if abs(total - 1.0) > SHARE_TOLERANCE:
        yield violation("mix", choice.name, f"shares add up to {total:.6g}", abs(total - 1.0))
    for service in mix.shares:
        if mix.models.get(service) != variants[service].model:
            message = f"{service} is of {variants[service].model}, not {mix.models.get(service)}"
            yield violation("mix", choice.name, message)
    error = sum(share * variants[service].error for service, share in mix.shares.items())
    if abs(error - mix.error) > SHARE_TOLERANCE:
        message = f"errs {error:.4%}, {mix.error:.4%} is stated"
        yield violation("error", choice.name, message, abs(error - mix.error))
    if choice.max_error is not None and error > choice.max_error + SHARE_TOLERANCE:
        message = f"errs {error:.4%}, at most {choice.max_error:.4%} is allowed"
        yield violation("error", choice.name, message, error - choice.max_error)
    if mix.max_error != choice.max_error:
        yield violation("error", choice.name, "states another max_error than is asked for")
    if mix.sticky != choice.sticky:
        yield violation("mix", choice.name, f"sticky is {mix.sticky}, not as it was asked")
    for model, min_share in choice.min_share.items():
        own = sum(share for s, share in mix.shares.items() if variants[s].model == model)
        if own < min_share - SHARE_TOLERANCE:
            message = f"{model} answers {own:.4%}, {min_share:.4%} is the least"
            yield violation("floor", choice.name, message, min_share - own)


def _check_shared(mixes: Sequence[ModelMix], choices: Sequence[Choice]) -> Iterator[Violation]:
    """A way that choices share serves the same share of each of them."""
    named: dict[str, list[str]] = {}
    for choice in choices:
        for variant in choice.variants:
            named.setdefault(variant.service, []).append(choice.name)
    shares = {mix.name: mix.shares for mix in mixes}
    for service, users in named.items():
        found = [shares[name].get(service, 0.0) for name in users if name in shares]
        if found and max(found) - min(found) > SHARE_TOLERANCE:
            message = f"{' and '.join(users)} have different shares of it"
            yield violation("mix", service, message, max(found) - min(found))

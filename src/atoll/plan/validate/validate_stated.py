"""The rules of `validate` for what a plan states of its services: models, launches of engines, promises."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from atoll.catalog.checkpoints import Checkpoint
from atoll.plan.plan import KeptPromise, Plan
from atoll.plan.problem import Problem, Service
from atoll.plan.request_groups import list_groups
from atoll.plan.validate.violation import TOLERANCE, Violation, exceeds, violation

_CHOSEN = ("max_num_batched_tokens", "max_num_seqs")
"""What a plan may choose where the fleet leaves the tokens of a step open (`Problem.started_as`)."""
_ROUNDED = 0.01
"""By what a share over all requests may differ from the mean of its groups: runs have unlike numbers."""


def check_models(plan: Plan, problem: Problem) -> Iterator[Violation]:
    """Yield models and weights that are not the fleet's; a plan need not state any.

    Whoever serves the plan loads what it states.
    """
    yield from _unknown(plan.models, problem, "models")
    yield from _unknown(plan.checkpoints, problem, "checkpoints")
    known = problem.checkpoints() if plan.checkpoints else {}
    for service in problem.services:
        name = service.name
        if plan.models and plan.models.get(name) != service.model:
            message = f"{plan.models.get(name, 'no model')} is stated, {service.model} is asked for"
            yield violation("model", name, message, field=f"models.{name}")
        stated, own = plan.checkpoints.get(name), known.get(name)
        if stated is not None and stated != own:
            weights = "none are known" if own is None else f"its model's are {_named(own)}"
            message = f"weights {_named(stated)} are stated, {weights}"
            yield violation("model", name, message, field=f"checkpoints.{name}")


def check_launches(plan: Plan, problem: Problem, *, same_problem: bool) -> Iterator[Violation]:
    """Yield services whose engines would be started otherwise than the fleet asks.

    Where it was made for another problem, only what its capacities rest on must be the same.
    """
    yield from _unknown(plan.engines, problem, "engines")
    served = {*plan.served_services}
    for name, asked in problem.launches().items():
        field = f"engines.{name}"
        stated = plan.engines.get(name)
        if stated is None:
            # Plans of earlier versions state nothing where nothing is set.
            if name in served and (plan.engines or problem.service(name).engine_limits.given):
                yield violation("engine", name, "no limits of its engines are stated", field=field)
            continue
        for key, value in asked:
            own = getattr(stated, key)
            if own == value or (key in _CHOSEN and _chose(problem.service(name), plan, key)):
                continue
            if not same_problem and (
                key == "promised_ttft_s" or (key == "max_model_len" and (own or 0) >= (value or 0))
            ):
                continue
            message = f"its engines are started with {key} {own}, {value} is asked for"
            yield violation("engine", name, message, field=f"{field}.{key}")


def _chose(service: Service, plan: Plan, key: str) -> bool:
    """Return whether a limit is one that the plan may choose, and follows from the tokens of a step."""
    limits, stated = service.engine_limits, plan.engines[service.name]
    if limits.max_num_batched_tokens is not None:
        return False
    tokens, sequences = stated.max_num_batched_tokens, limits.max_num_seqs
    if key == "max_num_batched_tokens" or tokens is None or sequences is None:
        return key == "max_num_batched_tokens"
    return stated.max_num_seqs == min(sequences, tokens)


def check_targets(plan: Plan, problem: Problem) -> Iterator[Violation]:
    """Yield promises of unknown services or groups, promises that are left out, and targets too low."""
    stated = {promise.service: promise for promise in plan.promises}
    # Plans of earlier versions say nothing of groups.
    grouped = any(promise.groups for promise in plan.promises)
    yield from _unknown(stated, problem, "promises")
    for service in problem.services:
        promise = stated.get(service.name)
        if promise is None:
            # Nobody knows what a service keeps that is not served at all.
            asked = service.demand_per_s > 0.0 and plan.served_fraction.get(service.name, 1.0) > 0.0
            if stated and asked:
                yield violation("promise", service.name, "nothing is stated of what it keeps")
            continue
        if exceeds(service.target, promise.target):
            message = f"its target is {promise.target:g}, {service.target:g} is asked for"
            amount = service.target - promise.target
            yield violation("promise", service.name, message, amount, field="promises.target")
        if grouped:
            yield from _check_groups(service, promise)


def check_simulated(plan: Plan, _problem: Problem) -> Iterator[Violation]:
    """Yield instances that carry more than the capacity model says in plans that were not simulated whole."""
    stated = {promise.service for promise in plan.promises}
    for instance in plan.instances:
        if instance.simulated is not None and instance.service not in stated:
            message = (
                "carries more than the capacity model says, and nothing is stated of what is kept"
            )
            yield violation("promise", instance.id, message)


def _check_groups(service: Service, promise: KeptPromise) -> Iterator[Violation]:
    """Yield groups of requests that a service does not have, that are left out, and targets too low."""
    asked = {group.name: group for group in list_groups(service)}
    stated = {group.name: group for group in promise.groups}
    for name in sorted(stated.keys() - asked.keys()):
        message = f"it has no requests of '{name}'"
        yield violation("promise", service.name, message, field="promises.groups.name")
    for name, group in asked.items():
        own = stated.get(name)
        if own is None:
            # Where prompts are of few lengths some deciles are empty.
            if group.kind == "class":
                message = f"nothing is stated of what '{name}' keeps"
                yield violation("promise", service.name, message, field="promises.groups")
        elif exceeds(group.target, own.target):
            message = f"the target of '{name}' is {own.target:g}, {group.target:g} is asked for"
            amount = group.target - own.target
            yield violation(
                "promise", service.name, message, amount, field="promises.groups.target"
            )


def check_intervals(plan: Plan) -> Iterator[Violation]:
    """Yield promises stated twice, or whose shares contradict each other."""
    for name, count in Counter(promise.service for promise in plan.promises).items():
        if count > 1:
            yield violation("promise", name, f"{count} promises are stated")
    for promise in plan.promises:
        low, kept, high = promise.low, promise.kept, promise.high
        if not low - TOLERANCE <= kept <= high + TOLERANCE:
            message = f"{kept:g} is kept, which is not between {low:g} and {high:g}"
            yield violation("promise", promise.service, message, field="promises.low")
        each = min(promise.kept_ttft, promise.kept_tpot)
        if kept > each + TOLERANCE:
            message = f"{kept:g} keep both promises, and only {each:g} one of them"
            yield violation("promise", promise.service, message, field="promises.kept")
        yield from _check_group_shares(promise)


def _check_group_shares(promise: KeptPromise) -> Iterator[Violation]:
    """Yield groups stated twice, or whose shares contradict each other or that of the service."""
    for name, count in Counter(group.name for group in promise.groups).items():
        if count > 1:
            message = f"'{name}' is stated {count} times"
            yield violation("promise", promise.service, message, field="promises.groups")
    for group in promise.groups:
        if (group.kept is None) != (group.requests == 0):
            message = (
                f"'{group.name}' has {group.requests} requests, and a share kept that is not theirs"
            )
            yield violation("promise", promise.service, message, field="promises.groups.requests")
        if group.kept is None:
            continue
        if not group.low - TOLERANCE <= group.kept <= group.high + TOLERANCE:
            message = (
                f"{group.kept:g} of '{group.name}' is not between {group.low:g} and {group.high:g}"
            )
            yield violation("promise", promise.service, message, field="promises.groups.low")
        each = min(group.each.values(), default=1.0)
        if group.kept > each + TOLERANCE:
            message = f"{group.kept:g} of '{group.name}' keep all, and only {each:g} one of them"
            yield violation("promise", promise.service, message, field="promises.groups.kept")
    for kind in ("class", "length"):
        own = [g for g in promise.groups if g.kind == kind and g.kept is not None]
        total = sum(group.requests for group in own)
        if not total:
            continue
        mean = sum(group.requests * (group.kept or 0.0) for group in own) / total
        if abs(mean - promise.kept) > _ROUNDED:
            message = f"{promise.kept:g} is kept, and {mean:g} by its groups of requests"
            yield violation("promise", promise.service, message, field="promises.groups.kept")


def _named(weights: Checkpoint) -> str:
    return ", ".join(f"{key} {value}" for key, value in weights.given.items())


def _unknown(names: Iterable[str], problem: Problem, field: str) -> Iterator[Violation]:
    known = {service.name for service in problem.services}
    for name in sorted(set(names) - known):
        message = f"{field} of an unknown service"
        yield violation("name", name, message, field=f"{field}.{name}")

"""The rules of `validate` for what is rented: machines, slices of them, prices, limits."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator

from atoll.plan.plan import Instance, Market, Node, Plan
from atoll.plan.problem import Offer, Problem
from atoll.plan.validate.violation import Rule, Violation, differs, exceeds, violation

Machine = tuple[str, str, Market, int | None] | str
"""Region, node type, market and slot; or the host."""


def check_gpus(plan: Plan) -> Iterator[Violation]:
    """Yield slices that are no part of a machine, or have GPUs that another one has, too."""
    holders: dict[Machine, dict[int, str]] = {}
    for instance in plan.instances:
        for node in instance.nodes:
            where = f"{instance.id} {node.id}"
            if node.gpu_ids is None:
                if node.slot is not None:
                    yield violation("slice", where, "a slot without GPUs; a whole machine has none")
                if node.host is None:
                    continue  # a machine of its own
            elif node.slot is None and node.host is None:
                yield violation("slice", where, "GPUs of a machine, yet no slot says of which")
                continue
            if node.gpu_shares > 1 and node.gpus > 1:
                message = f"{node.gpus} shares of GPUs in one node, which would take turns"
                yield violation("slice", where, message)
            gpu_ids = tuple(range(node.machine_gpus)) if node.gpu_ids is None else node.gpu_ids
            outside = sorted({gpu for gpu in gpu_ids if gpu >= node.machine_gpus})
            if outside:
                message = f"GPU {outside[0]} of a machine with {node.machine_gpus}"
                yield violation("slice", where, message, len(outside))
            machine = holders.setdefault(_machine(instance, node), {})
            for gpu in gpu_ids:
                if gpu in machine:
                    message = f"GPU {gpu} of {_name(node)} is also {machine[gpu]}'s"
                    rule: Rule = "slice" if node.host is None else "host"
                    yield violation(rule, where, message)
                    break
                machine[gpu] = where


def _machine(instance: Instance, node: Node) -> Machine:
    if node.host is not None:
        return node.host
    return (instance.region_of(node), node.node_type, node.market, node.slot)


def _name(node: Node) -> str:
    return node.host if node.host is not None else f"machine {node.slot} ({node.node_type})"


def check_offers(plan: Plan, problem: Problem) -> Iterator[Violation]:
    """Yield machines that are not on offer or not so many, and slices that no machine is cut into."""
    for (region, kind, market), count in sorted(plan.count_nodes().items()):
        where = f"{region} {kind} {market}"
        offer = problem.offer(region, kind, market)
        if offer is None:
            yield violation("offer", where, f"{count} used, none on offer", count)
        elif count > offer.available:
            message = f"{count} used, {offer.available} available"
            yield violation("availability", where, message, count - offer.available)
    for instance in plan.instances:
        for node in instance.nodes:
            offer = _offer(problem, instance, node)
            if offer is not None and node.gpu_ids is not None:
                yield from _cut(instance, node, offer)


def _cut(instance: Instance, node: Node, offer: Offer) -> Iterator[Violation]:
    where = f"{instance.id} {node.id}"
    if node.gpus not in offer.sizes:
        sizes = ", ".join(map(str, offer.sizes))
        cut = "is not cut" if offer.whole else f"is cut into slices of {sizes} GPUs"
        yield violation("slice", where, f"{node.gpus} GPUs, and {node.node_type} {cut}")
    if node.slot is not None and node.slot >= offer.available:
        message = f"machine {node.slot}, counted from 0, and {offer.available} are available"
        yield violation("slice", where, message)


def check_region(plan: Plan, problem: Problem) -> Iterator[Violation]:
    """Yield rented instances whose nodes stand in two regions; those of a cluster may."""
    if problem.cluster is not None:
        return
    for instance in plan.instances:
        for node in instance.nodes:
            if instance.region_of(node) != instance.region:
                message = f"stands in {node.region}, its instance in {instance.region}"
                yield violation("region", f"{instance.id} {node.id}", message)


def check_prices(plan: Plan, problem: Problem) -> Iterator[Violation]:
    """Yield costs that are not those of the machines: a slice costs its share, a machine is paid whole."""
    for instance in plan.instances:
        usd = 0.0
        known = True
        for node in instance.nodes:
            offer = _offer(problem, instance, node)
            known &= offer is not None
            usd += 0.0 if offer is None else offer.usd_per_hour * node.gpus / offer.gpus
        # Where there is no offer its own rule says so.
        if known and differs(usd, instance.usd_per_hour):
            message = f"its nodes cost ${usd:g}/h, ${instance.usd_per_hour:g}/h is stated"
            yield violation("cost", instance.id, message, abs(usd - instance.usd_per_hour))
    machines = 0.0
    for key, count in plan.count_nodes().items():
        offer = problem.offer(*key)
        if offer is None:
            break
        machines += count * offer.usd_per_hour
    else:
        if differs(machines, plan.usd_per_hour):
            message = f"its machines cost ${machines:g}/h, ${plan.usd_per_hour:g}/h is stated"
            yield violation("cost", plan.problem_name, message, abs(machines - plan.usd_per_hour))
    fresh = sum(instance.usd_per_hour for instance in plan.instances if not instance.kept)
    init = fresh * problem.settings.init_penalty
    if differs(init, plan.init_usd):
        message = f"initialisation costs ${init:g}/h, ${plan.init_usd:g}/h is stated"
        yield violation("cost", plan.problem_name, message, abs(init - plan.init_usd))


def check_limits(plan: Plan, problem: Problem) -> Iterator[Violation]:
    """Yield where a plan goes beyond the budget or the number of machines."""
    limits, here = problem.limits, plan.problem_name
    budget = limits.budget_usd_per_hour
    if budget is not None and exceeds(plan.usd_per_hour, budget):
        message = f"${plan.usd_per_hour:g}/h with a budget of ${budget:g}/h"
        yield violation("budget", here, message, plan.usd_per_hour - budget)
    if limits.max_nodes is not None and plan.nodes > limits.max_nodes:
        message = f"{plan.nodes} nodes of at most {limits.max_nodes}"
        yield violation("max-nodes", here, message, plan.nodes - limits.max_nodes)


def check_spread(plan: Plan, problem: Problem) -> Iterator[Violation]:
    """Yield roles that stand in fewer regions than asked for."""
    min_spread = problem.limits.spread
    by_role = itertools.groupby(
        sorted((i.role, i.region_of(node)) for i in plan.instances for node in i.nodes),
        key=lambda pair: pair[0],
    )
    for role, pairs in by_role:
        regions = {region for _, region in pairs}
        if len(regions) < min_spread:
            message = f"stands in {len(regions)} regions, {min_spread} are asked for"
            yield violation("spread", role, message, min_spread - len(regions))


def check_running(plan: Plan, problem: Problem) -> Iterator[Violation]:
    """Yield instances said to be kept that do not run."""
    running = Counter(instance.placement_key for instance in problem.running)
    kept = Counter(instance.placement_key for instance in plan.instances if instance.kept)
    for key, count in kept.items():
        if count > running[key]:
            message = f"{count} said to be kept, {running[key]} run"
            yield violation("kept", f"{key[0]} {key[1]}", message, count - running[key])


def _offer(problem: Problem, instance: Instance, node: Node) -> Offer | None:
    return problem.offer(instance.region_of(node), node.node_type, node.market)

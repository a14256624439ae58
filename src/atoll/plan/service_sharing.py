"""Services of one model on the same instances: ways that they share, beside a way of each one's own.

A shared way is a service as any other: the sum of its sharers' rates, the lengths of the mixture of their
requests, and capacity for the tightest of their promises. Its classes of requests are its sharers, each with
its own lengths, promises and share of requests that must keep them: a few long prompts among many short ones
are judged by themselves. At level y it serves a share y of each of them, so how much is shared is a plan's to
say, as which model answers is (`choice`).

Services share where they have the model, the phases, the engine's limits and the nodes that they may stand
on in common. Of those, sorted by promise, neighbours share: who is promised less than another gets more
than it asked for, and between neighbours that is least.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from atoll.plan.choice import Choice, Variant
from atoll.plan.problem import Lengths, Reserve, Service
from atoll.workload.classes import RequestClass

MAX_SHARERS = 4
"""Services on one shared way."""
MAX_WAYS = 12
"""Shared ways of one model."""
_NO_SHARE = 1e-7
"""Of the requests of a shared way, the share below which a sharer is not judged by itself."""
_MAX_LABEL = 60
"""Characters of a sharer's name in that of its class of requests."""
_PREFIX = "shared"
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9._-]+")


class SharedProblem(NamedTuple):
    """Services and choices with shared ways among them.

    `sharers` are by shared way the services or choices that it serves, by the names that requests ask for.
    """

    services: tuple[Service, ...]
    choices: tuple[Choice, ...]
    sharers: dict[str, tuple[str, ...]]


class _Own(NamedTuple):
    """A way of one alone: the service, whom it answers, and how often it errs."""

    service: Service
    asked: str
    error: float


def name_part(model: str) -> str:
    """Return what a model is called in the name of a service: what names may not have becomes "-"."""
    return _NOT_IN_NAMES.sub("-", model).strip("-._")


def own_name(service: str) -> str:
    """Return what the own way of a service that shares is called."""
    return f"{service}.own"


def share_services(services: Sequence[Service], choices: Sequence[Choice]) -> SharedProblem:
    """Return services and choices with the ways that may be shared.

    A plain service that may share becomes a choice of its name; its own way is called NAME.own.
    """
    named = {service.name: service for service in services}
    own = [
        _Own(named[v.service], choice.name, v.error) for choice in choices for v in choice.variants
    ]
    optional = {way.service.name for way in own}
    own += [_Own(s, s.name, 0.0) for s in services if s.name not in optional]
    # Names that are made up here must not be those of anything else.
    taken = set(named) | {choice.name for choice in choices}
    shared: list[Service] = []
    variants: dict[str, list[Variant]] = {}
    sharers: dict[str, tuple[str, ...]] = {}
    for model in sorted({way.service.model for way in own}):
        groups = _choose_groups([way for way in own if way.service.model == model])
        for number, group in enumerate(groups, 1):
            count = f".{number}" if len(groups) > 1 else ""
            name = _free(f"{_PREFIX}.{name_part(model)}{count}", taken)
            shared.append(merge_services(name, {way.asked: way.service for way in group}))
            sharers[name] = tuple(way.asked for way in group)
            for way in group:
                variant = Variant(service=name, model=model, error=way.error)
                variants.setdefault(way.asked, []).append(variant)
    kept = [_with_ways(choice, variants.get(choice.name, ())) for choice in choices]
    all_services = [s for s in services if s.name in optional or s.name not in variants]
    for service in services:
        if service.name not in optional and service.name in variants:
            name = _free(own_name(service.name), taken)
            all_services.append(service.model_copy(update={"name": name}))
            mine = Variant(service=name, model=service.model)
            kept.append(Choice(name=service.name, variants=(mine, *variants[service.name])))
    return SharedProblem((*all_services, *shared), tuple(kept), sharers)


def merge_services(name: str, sharers: Mapping[str, Service]) -> Service:
    """Return the service that carries what these carry, by the names that requests ask for.

    Rates are added, lengths mixed, and each is a class of requests of its own.
    """
    services = list(sharers.values())
    return services[0].model_copy(
        update={
            "name": name,
            "rate_per_s": math.fsum(s.rate_per_s for s in services),
            "lengths": _lengths_of(services),
            "ttft_s": min(s.ttft_s for s in services),
            "tpot_s": min(s.tpot_s for s in services),
            "attainment": max(s.attainment for s in services),
            "headroom": max(s.headroom for s in services),
            "burstiness": max(s.burstiness for s in services),
            "priority": max(s.priority for s in services),
            "reserve": _reserve_of(services),
            "text_classes": _classes_of(sharers),
        }
    )


def _reserve_of(services: Sequence[Service]) -> Reserve | None:
    """Return the strictest reserve of all sharers, None where none states any."""
    stated = [service.reserve for service in services if service.reserve is not None]
    if not stated:
        return None
    return Reserve(
        share=max((one.share for one in stated if one.share is not None), default=None),
        quantile=max((one.quantile for one in stated if one.quantile is not None), default=None),
    )


def _lengths_of(sharers: Sequence[Service]) -> Lengths:
    """Return the lengths of the requests of all sharers.

    The tail stands for the sharer that has least time for its prompts: as many tokens as leave the tightest
    promise so much time by token.
    """
    tightest = min(s.ttft_s for s in sharers)
    tails = (max(s.lengths.input_tail, s.lengths.input_mean) * tightest / s.ttft_s for s in sharers)
    mixed = mix_lengths([(s.rate_per_s, s.lengths) for s in sharers])
    return mixed.model_copy(update={"input_tail": max(tails)})


def _classes_of(sharers: Mapping[str, Service]) -> tuple[RequestClass, ...]:
    """Return the classes of requests that sharers are, of those that are asked for anything."""
    total = math.fsum(s.rate_per_s for s in sharers.values())
    taken: set[str] = set()
    classes = []
    for asked, sharer in sharers.items():
        if sharer.rate_per_s <= _NO_SHARE * total:
            continue
        input_cv, output_cv = sharer.lengths.mix().spreads
        classes.append(
            RequestClass(
                name=f"text ({_free(asked[:_MAX_LABEL], taken)})",
                share=sharer.rate_per_s / total,
                input_tokens=sharer.lengths.input_mean,
                output_tokens=sharer.lengths.output_mean,
                input_cv=input_cv,
                output_cv=output_cv,
                ttft_s=sharer.ttft_s,
                tpot_s=sharer.tpot_s,
                attainment=sharer.attainment,
            )
        )
    return tuple(sorted(classes, key=lambda klass: klass.name)) if len(classes) > 1 else ()


def mix_lengths(parts: Sequence[tuple[float, Lengths]]) -> Lengths:
    """Return the lengths of requests that arrive at these rates; alike where nothing arrives.

    Moments of a mixture mix linearly. The longest prompt that must keep its promise is the longest of all.
    """
    total = math.fsum(rate for rate, _ in parts)
    weights = [rate / total if total > 0.0 else 1.0 / len(parts) for rate, _ in parts]

    def mean(values: Iterable[float]) -> float:
        return math.fsum(w * value for w, value in zip(weights, values, strict=True))

    lengths = [each for _, each in parts]
    return Lengths(
        input_mean=mean(each.input_mean for each in lengths),
        output_mean=mean(each.output_mean for each in lengths),
        input_mean_square=mean(each.input_mean_square for each in lengths),
        output_mean_square=mean(each.output_mean_square for each in lengths),
        input_tail=max(each.input_tail for each in lengths),
    )


def _choose_groups(ways: Sequence[_Own]) -> list[tuple[_Own, ...]]:
    """Return which ways of a model to share: neighbours by promise, of many those that lose least."""
    alike: dict[object, list[_Own]] = {}
    for way in ways:
        # Executors of any-to-any models are not shared; nor is what is promised to groups of requests, which
        # could not be told from those of others.
        # Nor are beginnings of prompts: each service has its own.
        one_group = not (
            way.service.text_classes or way.service.length_deciles or way.service.prefix
        )
        if way.service.roles and one_group:
            alike.setdefault(_settings_of(way.service), []).append(way)
    groups = []
    for members in alike.values():
        # Neighbours by promise lose least when they share one.
        members.sort(key=lambda way: (way.service.ttft_s, way.service.tpot_s, way.asked))
        for size in range(2, MAX_SHARERS + 1):
            groups += [tuple(members[at : at + size]) for at in range(len(members) - size + 1)]
    # Names settle ties, so that the choice does not depend on the order of the services.
    groups.sort(key=lambda group: (_loss(group), -len(group), [way.asked for way in group]))
    return groups[:MAX_WAYS]


def _settings_of(service: Service) -> object:
    """Return the settings that services must have in common to share instances."""
    limits = tuple(
        sorted((name, str(value)) for name, value in service.engine_limits.given.items())
    )
    return (service.only, service.avoid, service.phases, limits)


def _loss(group: Sequence[_Own]) -> float:
    """How much tighter a shared promise is than its sharers ask: logarithms, by request."""
    services = [way.service for way in group]
    first, later = min(s.ttft_s for s in services), min(s.tpot_s for s in services)
    total = math.fsum(s.rate_per_s for s in services)
    weighed = (
        (s.rate_per_s if total > 0.0 else 1.0)
        * (math.log(s.ttft_s / first) + math.log(s.tpot_s / later))
        for s in services
    )
    return math.fsum(weighed) / (total if total > 0.0 else len(services))


def _with_ways(choice: Choice, more: Sequence[Variant]) -> Choice:
    return choice.model_copy(
        update={
            "variants": tuple(
                sorted((*choice.variants, *more), key=lambda variant: variant.service)
            )
        }
    )


def _free(name: str, taken: set[str]) -> str:
    """Return a name that nothing has, and take it."""
    found, number = name, 2
    while found in taken:
        found, number = f"{name}-{number}", number + 1
    taken.add(found)
    return found


def sharers_of(names: Mapping[str, Iterable[str]]) -> dict[str, tuple[str, ...]]:
    """Return the services that several choices name, with those choices; `names` are by choice."""
    found: dict[str, list[str]] = {}
    for choice, services in sorted(names.items()):
        for service in services:
            found.setdefault(service, []).append(choice)
    return {service: tuple(who) for service, who in sorted(found.items()) if len(who) > 1}

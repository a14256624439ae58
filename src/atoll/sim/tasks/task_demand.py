"""The requests of a run: when they come, of which class, and how much of everything they want."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from atoll.core.errors import InputError
from atoll.core.rng import stream
from atoll.sim.sim_arrays import Floats, Longs
from atoll.sim.tasks.task_fleet import Amount, ClassSpec, PartNeed, TaskFleet, TokenPart
from atoll.workload.arrivals import Renewal
from atoll.workload.sampling import LogNormal


@dataclass(frozen=True, slots=True)
class Arrivals:
    """When requests come: gaps with a CV (1: Poisson), by service where told, or all `at_once` at time 0."""

    cv: float = 1.0
    at_once: bool = False
    cv_of: Mapping[str, float] = field(default_factory=dict, hash=False)


class Demand(NamedTuple):
    """Requests in order of arrival: class by number in the fleet, tokens of text in and out."""

    arrival_s: Floats
    klass: Longs
    input: Floats
    output: Floats

    def take(self, rows: Longs) -> Demand:
        """Return some of the requests."""
        return Demand(self.arrival_s[rows], self.klass[rows], self.input[rows], self.output[rows])


class Wants(NamedTuple):
    """Work that requests of one class ask of one part."""

    items: Longs
    prompt: Longs
    answer: Longs
    clipped: Longs


def draw_demand(
    fleet: TaskFleet,
    arrivals: Arrivals,
    *,
    requests: int | None,
    duration_s: float | None,
    seed: int,
) -> Demand:
    """Draw the first `requests` requests of all services, or those of `duration_s` seconds."""
    if (requests is None) == (duration_s is None):
        raise InputError("give a number of requests or a duration", field="requests")
    if requests is not None and requests < 1:
        raise InputError("at least one request comes", field="requests")
    if duration_s is not None and (arrivals.at_once or not 0.0 < duration_s < math.inf):
        raise InputError("requests come at once or for some seconds", field="duration_s")
    if arrivals.at_once:
        weight = np.array([klass.rate_per_s for klass in fleet.classes])
        rng = stream(seed, "tasks", "arrivals")
        klass = rng.choice(len(weight), size=requests, p=weight / weight.sum())
        arrival_s = np.zeros(len(klass))
    else:
        arrival_s, klass = _arrivals(fleet, arrivals, requests, duration_s, seed)
    order = np.argsort(arrival_s, kind="stable")[:requests]
    arrival_s, klass = arrival_s[order], klass[order].astype(np.int64)
    tokens = np.zeros((2, len(klass)))
    for at, one in enumerate(fleet.classes):
        mine = np.flatnonzero(klass == at)
        rng = stream(seed, "tasks", "lengths", *one.key)
        tokens[0, mine] = _lengths(rng, one.input_tokens, one.input_cv, len(mine))
        tokens[1, mine] = _lengths(rng, one.output_tokens, one.output_cv, len(mine))
    return Demand(arrival_s, klass, tokens[0], tokens[1])


def check_demand(fleet: TaskFleet, demand: Demand, until_s: float) -> None:
    """Refuse requests that cannot be simulated."""
    if not len(demand.klass) or not demand.arrival_s[0] <= until_s:
        raise InputError("no request comes in that time", field="duration_s", hint="take longer")
    if demand.arrival_s[0] < 0.0 or (np.diff(demand.arrival_s) < 0.0).any():
        raise InputError("requests are in order of their arrival, from 0 on", field="demand")
    if demand.klass.min() < 0 or demand.klass.max() >= len(fleet.classes):
        raise InputError("a request is of no class of the fleet", field="demand")


def draw_wants(
    fleet: TaskFleet, klass: ClassSpec, part: str, need: PartNeed, demand: Demand, seed: int
) -> Wants:
    """Return what the requests of a class want of a part; `demand` is of that class alone.

    Sequences that no executor's KV cache has room for are cut, as engines do.
    """
    count = len(demand.klass)
    rng = stream(seed, "tasks", "items", *klass.key, part)
    whole = math.floor(need.items)
    items = whole + (rng.random(count) < need.items - whole).astype(np.int64)
    prompt = _tokens(amount(need.prompt, demand))
    answer = _tokens(amount(need.answer, demand))
    models = [executor.parts[part] for executor in fleet.candidates(klass, part)]
    room = min((m.kv_tokens for m in models if isinstance(m, TokenPart)), default=None)
    if room is None:
        return Wants(items, prompt, answer, np.zeros(count, np.int64))
    fitting = np.minimum(prompt, room - 1)
    kept = np.minimum(answer, room - fitting)
    return Wants(items, fitting, kept, ((fitting < prompt) | (kept < answer)).astype(np.int64))


def amount(of: Amount, demand: Demand) -> Floats:
    """Return an amount for every request."""
    return np.asarray(of.fixed + of.per_input * demand.input + of.per_output * demand.output)


def _tokens(values: Floats) -> Longs:
    return np.maximum(1, np.rint(values)).astype(np.int64)


def _arrivals(
    fleet: TaskFleet,
    arrivals: Arrivals,
    requests: int | None,
    duration_s: float | None,
    seed: int,
) -> tuple[Floats, Longs]:
    """Times and classes of the requests of all services, one service after the other."""
    times: list[Floats] = []
    classes: list[Longs] = []
    for service in dict.fromkeys(klass.service for klass in fleet.classes):
        own = [at for at, klass in enumerate(fleet.classes) if klass.service == service]
        rates = np.array([fleet.classes[at].rate_per_s for at in own])
        total = float(rates.sum())
        rng = stream(seed, "tasks", "arrivals", service)
        cv = arrivals.cv_of.get(service, arrivals.cv)
        times.append(_times(rng, cv, total, requests, duration_s))
        chance = rng.random(len(times[-1]))
        drawn = np.searchsorted(np.cumsum(rates) / total, chance, side="right")
        classes.append(np.array(own)[np.minimum(drawn, len(own) - 1)])
    return np.concatenate(times), np.concatenate(classes)


def _times(
    rng: np.random.Generator,
    cv: float,
    rate: float,
    requests: int | None,
    duration_s: float | None,
) -> Floats:
    renewal = Renewal("poisson" if cv == 1.0 else "gamma", cv)
    first = renewal.first(rng)
    if requests is not None:
        return np.asarray(np.cumsum([first, *renewal.gaps(rng, requests - 1)]) / rate)
    assert duration_s is not None
    due = duration_s * rate
    came = [first]
    while came[-1] < due:
        came.extend(came[-1] + np.cumsum(renewal.gaps(rng, 1024)))
    return np.array([time for time in came if time < due]) / rate


def _lengths(rng: np.random.Generator, mean: float, cv: float, count: int) -> Floats:
    if cv == 0.0:
        return np.full(count, mean)
    return LogNormal(mean, cv).draw(rng, count).astype(np.float64)

"""Inputs of `decide`: what the controller sees, what it remembers, and its settings.

All of it is frozen and holds no clock, no connection and no file: time is a field. A `View` is put together
by whoever observes (targets, gateways, price lists), a `Memory` is what `decide` returned last time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from pydantic import Field

from atoll.core.frozen import Frozen
from atoll.deploy.target import InstanceStatus
from atoll.plan.plan import (
    Instance,
    NotNegative,
    OfferKey,
    Plan,
    RequestPath,
    Route,
    Share,
)
from atoll.plan.problem import Lengths, Offer, Positive, Problem, Service
from atoll.plan.startup import StartupTimes

DAY_S = 86_400.0


@dataclass(frozen=True, slots=True)
class TrafficWindow:
    """Requests per second over the last so many seconds, and the moments of their lengths if any came."""

    rate_per_s: float
    lengths: Lengths | None = None


@dataclass(frozen=True, slots=True)
class TrafficSeen:
    """Recent traffic of a service.

    `profile` are its usual rates over `period_s` (a day or a week) in equal slots, the first of which begins
    at Unix time 0 modulo the period; only their ratios count, and an empty one says that no rhythm is known.
    `classes` are the same of each class of an any-to-any service, under the name of the class.
    """

    service: str
    minute: TrafficWindow
    five_minutes: TrafficWindow
    hour: TrafficWindow
    profile: tuple[float, ...] = ()
    period_s: float = DAY_S
    classes: tuple[TrafficSeen, ...] = ()


@dataclass(frozen=True, slots=True)
class PromiseSeen:
    """Which share of a service's latest requests kept its promises, of how many; the share it shall keep.

    Of one `group` of them where it is named.
    """

    service: str
    kept: float
    target: float
    requests: int
    group: str | None = None

    @property
    def is_broken(self) -> bool:
        """Whether fewer keep it than shall, by more than chance: two standard errors of the share."""
        error = math.sqrt(self.target * (1.0 - self.target) / max(1, self.requests))
        return self.kept < self.target - 2.0 * error


@dataclass(frozen=True, slots=True)
class PaceSeen:
    """Mean seconds per token after the first that clients of an instance saw, over so many tokens.

    `rate_per_s` are the requests that it answered meanwhile.
    """

    instance: str
    token_s: float
    tokens: int
    rate_per_s: float


@dataclass(frozen=True, slots=True)
class ObservedInstance:
    """An instance as its target sees it, and what it consists of."""

    status: InstanceStatus
    instance: Instance

    @property
    def id(self) -> str:
        """Its name in the fleet, as its labels say."""
        return self.status.labels.instance


@dataclass(frozen=True, slots=True)
class EndNotice:
    """A machine, or what stands under a handle, is taken away at `ends_s` (Unix time)."""

    name: str
    ends_s: float
    reason: str = "its machine is taken back"


@dataclass(frozen=True, slots=True)
class View:
    """The world at `time_s` (seconds of Unix time).

    `problem` is what the fleet file asks for; its offers and rates are what was written down, `offers` and
    `traffic` what is true now. `instances` are all that targets list, ended ones too. A start that a target
    refused is listed as failed, with the refusal as its reason; of a target that does not answer, what it
    listed last. `term` is that of the controller's lease.
    """

    time_s: float
    problem: Problem
    offers: tuple[Offer, ...]
    traffic: tuple[TrafficSeen, ...] = ()
    promises: tuple[PromiseSeen, ...] = ()
    instances: tuple[ObservedInstance, ...] = ()
    notices: tuple[EndNotice, ...] = ()
    term: int = 0


@dataclass(frozen=True, slots=True)
class PendingForecast:
    """A forecast whose time is not over: of the highest rate until `due_s`, and the highest so far."""

    made_s: float
    due_s: float
    predicted_per_s: float
    highest_per_s: float


@dataclass(frozen=True, slots=True)
class ForecastState:
    """Errors and corrections that forecasting a service has learned.

    `errors` are logarithms of what came over what was predicted, the latest last. `recent` are the latest
    demands (time, requests/s) that were planned for or could have been: capacity goes down only to the
    highest of them. `planned_per_s` is the rate planned for last. `boost` is by how much more is planned
    because promises were broken, raised last at `boosted_s`. `classes` are the same of its classes.
    """

    service: str
    errors: tuple[float, ...] = ()
    pending: tuple[PendingForecast, ...] = ()
    recent: tuple[tuple[float, float], ...] = ()
    planned_per_s: float = 0.0
    boost: float = 1.0
    boosted_s: float | None = None
    classes: tuple[ForecastState, ...] = ()


def name_class(service: str, klass: str) -> str:
    """Return the name of a class of a service where names are those of services."""
    return f"{service}/{klass}"


Mixes = Mapping[str, Mapping[str, float]]
"""By any-to-any service and class, which share of the service's requests is of the class."""


def list_mixes(problem: Problem) -> dict[str, dict[str, float]]:
    """Return the mixes that a problem asks for."""
    return {
        service.name: {klass.name: klass.share for klass in service.classes}
        for service in problem.graph_services
    }


@dataclass(frozen=True, slots=True)
class Backoff:
    """Nothing is started there until `until_s`, after `failures` in a row.

    `key` is an offer, or the service alone where what is wrong is with it whatever machine it stands on.
    """

    key: OfferKey | str
    failures: int
    until_s: float
    reason: str

    def describe(self) -> str:
        """Return what is held back and why."""
        what = f"service {self.key}" if isinstance(self.key, str) else " ".join(self.key)
        return f"{what}: {self.failures} failed in a row, {self.reason}"


@dataclass(frozen=True, slots=True)
class Memory:
    """State that one decision leaves for the next; `recall` makes one from what runs alone.

    `plan` is in force: its instances have the names they carry, or will carry, in the fleet. `planned_s` is
    when it was made or last found still good, `asked` the problem, `bands` the requests/s of every service,
    `mixes` the shares of classes and `offers` the market that it was for. `tried_s` and `tried_for` say when
    and why planning was last begun. `deaths` counts the deaths in a row of a host, with the time of the last,
    `states` is how instances stood last time and since when, `routes` what gateways were told, `paths` what
    graph servers were.
    """

    asked: Problem | None = None
    plan: Plan | None = None
    plan_hash: str = ""
    planned_s: float | None = None
    bands: tuple[tuple[str, float], ...] = ()
    mixes: Mixes = field(default_factory=dict)
    offers: tuple[Offer, ...] = ()
    tried_s: float | None = None
    tried_for: tuple[str, ...] = ()
    forecasts: tuple[ForecastState, ...] = ()
    backoffs: tuple[Backoff, ...] = ()
    deaths: tuple[tuple[str, int, float], ...] = ()
    states: tuple[tuple[str, str, float], ...] = ()
    routes: tuple[Route, ...] | None = None
    paths: tuple[RequestPath, ...] = ()

    @property
    def wanted(self) -> tuple[Instance, ...]:
        """The instances of the plan in force."""
        return () if self.plan is None else self.plan.instances


class ControlPolicy(Frozen):
    """How the controller acts; every field has a default that suits a fleet of large models."""

    epoch_s: Positive = Field(default=900.0, description="Plans are made anew this often.")
    startup_s: NotNegative = Field(
        default=300.0, description="From starting an instance to serving."
    )
    ready_within_s: Positive = Field(
        default=1800.0, description="An instance that is not ready by then has failed."
    )
    drain_s: NotNegative = Field(
        default=300.0, description="A drained instance that still runs then is stopped."
    )
    move_s: NotNegative = Field(
        default=60.0,
        description="Before its machine is taken away, an instance is drained this much earlier.",
    )
    quantile: float = Field(
        default=0.8, gt=0, lt=1, description="The quantile of the forecast that is planned for."
    )
    down_quantile: float = Field(
        default=0.93,
        gt=0,
        lt=1,
        description="The quantile of the forecast that what stays must carry for a saving to last.",
    )
    reserve: NotNegative = Field(
        default=0.0,
        description="At least this share more than is asked now is planned for, for bursts.",
    )
    min_share: Share = Field(
        default=0.02, description="Share of a service's written rate that is always planned for."
    )
    band_up: NotNegative = Field(
        default=0.1, description="Plan at once where demand is this share above the plan's."
    )
    band_down: Share = Field(
        default=0.3, description="Plan at once where demand is this share below the plan's."
    )
    mix_moves: Share = Field(
        default=0.05,
        description="Plan at once where a class's share of its service's requests moved by so much.",
    )
    slack: Share = Field(
        default=0.07, description="Plan at once where a lane carries this share too little."
    )
    down_after_s: NotNegative = Field(
        default=300.0, description="Capacity follows demand down this much later."
    )
    recover_s: NotNegative = Field(
        default=900.0,
        description="While a service's promises are broken nothing of it is given up until this long after "
        "it got more: what waits is worked off first.",
    )
    price_moves: Positive = Field(
        default=0.1, description="Plan at once where a price moved by this share."
    )
    count_moves: Positive = Field(
        default=0.5, description="Plan at once where an offer's count moved by this share."
    )
    retry_s: NotNegative = Field(
        default=120.0, description="Time between two plans made for the same reason."
    )
    payback_s: Positive = Field(
        default=10800.0,
        description="A change that is not needed must pay for itself within this time, or sooner where what "
        "it saves is expected to last less long.",
    )
    cold_s: NotNegative = Field(
        default=900.0,
        description="What a cold cache costs: so many seconds of the rent of an instance that starts.",
    )
    start_risk: Share = Field(
        default=0.05, description="Chance that a start is in vain, by which it costs more."
    )
    margin: NotNegative = Field(
        default=0.25, description="It must save this share more than it costs in that time."
    )
    surge_share: Share = Field(
        default=0.25,
        description="Replacements that start at once, as a share of instances; one at least.",
    )
    parallel_starts: int = Field(default=64, ge=1, description="Most instances that start at once.")
    parallel_drains: int = Field(default=32, ge=1, description="Most instances that drain at once.")
    backoff_s: Positive = Field(default=60.0, description="First wait after a failed start.")
    backoff_max_s: Positive = Field(default=3600.0, description="Longest wait after failed starts.")
    settled_s: NotNegative = Field(
        default=600.0, description="What ends sooner after it was ready counts as a failed start."
    )
    missing_s: NotNegative = Field(
        default=60.0,
        description="What a target lists no longer, and nobody ended, is gone after this long.",
    )
    deaths: int = Field(default=3, ge=1, description="A host is set aside after so many in a row.")
    set_aside_s: NotNegative = Field(
        default=6 * 3600.0, description="For how long a host that keeps dying is set aside."
    )
    enough_requests: int = Field(
        default=100, ge=1, description="Fewer requests say nothing about a promise."
    )
    boost: NotNegative = Field(
        default=0.1, description="Plan for this share more each time a promise is found broken."
    )
    boost_most: float = Field(default=2.0, ge=1, description="Most times the forecast to plan for.")

    @classmethod
    def for_problem(cls, problem: Problem, **own: float) -> ControlPolicy:
        """Return a policy for a fleet: a start may take a quarter more than its instances are known to."""
        return cls.parse({"startup_s": 1.25 * StartupTimes(problem).longest_s, **own})

    def of(self, service: Service) -> ControlPolicy:
        """Return the policy for a service: with the reserve that its fleet file states, if it does."""
        stated = service.reserve
        if stated is None:
            return self
        update: dict[str, float] = {}
        if stated.share is not None:
            update["reserve"] = stated.share
        if stated.quantile is not None:
            update["quantile"] = stated.quantile
        return self.model_copy(update=update)

    @property
    def start_rent_s(self) -> float:
        """What a start costs: seconds of the rent of the instance."""
        return (1.0 + self.start_risk) * self.startup_s + self.cold_s

    @property
    def horizon_s(self) -> float:
        """How far ahead demand matters: what is decided now serves after start-up, until the next plan."""
        return self.startup_s + self.epoch_s

    @property
    def lead_s(self) -> float:
        """How long before its end an instance is replaced: twice the start-up, and time to move streams."""
        return 2.0 * self.startup_s + self.move_s


def recall(view: View) -> Memory:
    """Return the memory of a controller that has just started: what runs is the plan in force.

    Nothing else is known, so the next decision makes a plan, with all of that as running. Failures that
    targets still list count once more.
    """
    return Memory(plan=adopt_running(view.problem, view.instances))


def adopt_running(
    problem: Problem, observed: Iterable[ObservedInstance], plan: Plan | None = None
) -> Plan | None:
    """Return a plan of what starts or serves beside what `plan` has already, None where there is nothing."""
    known = {} if plan is None else {instance.id: instance for instance in plan.instances}
    found = {
        seen.id: seen.instance.model_copy(update={"id": seen.id, "kept": True})
        for seen in observed
        if seen.status.state in ("starting", "ready") and seen.id not in known
    }
    if not found:
        return plan
    instances = (*known.values(), *found.values())
    return Plan(
        problem_hash="",
        problem_name=problem.name,
        instances=instances,
        usd_per_hour=sum(instance.usd_per_hour for instance in instances),
        status="feasible",
        solver="what runs",
    )

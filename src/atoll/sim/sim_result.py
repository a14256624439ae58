"""Results of a simulation: per request, service, node and instance, over time, and the cost."""

from __future__ import annotations

import io
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from atoll.core.errors import MissingDependencyError, UsageError
from atoll.core.files import atomic_write
from atoll.plan.kept_groups import KeptGroup, judge_groups
from atoll.plan.problem import Problem, Service
from atoll.plan.request_groups import group_requests
from atoll.sim import sim_arrays as a
from atoll.sim.kept_through import KeptThroughLoss, kept_through_losses
from atoll.sim.lifetime import GAP_MIN_S, GAP_PER_DECADE
from atoll.sim.sim_links import link_names
from atoll.sim.sim_options import SimOptions

if TYPE_CHECKING:
    from pandas import DataFrame

    from atoll.sim.sim_build import Built

PERCENTILES = (50, 90, 95, 99)
OUTCOMES = ("finished", "dropped", "unfinished")
FILE_ENDINGS = (".csv", ".parquet")


class Spread(NamedTuple):
    """A latency in seconds: mean and percentiles; None where there is nothing to look at."""

    mean: float | None
    p50: float | None
    p90: float | None
    p95: float | None
    p99: float | None

    @classmethod
    def of(cls, values: a.Floats) -> Spread:
        """Return the spread of values, those that are not known left out."""
        known = values[np.isfinite(values)]
        if not len(known):
            return cls(None, None, None, None, None)
        marks = np.percentile(known, PERCENTILES)
        return cls(float(known.mean()), *(float(mark) for mark in marks))


@dataclass(frozen=True, slots=True)
class ServiceSummary:
    """One service over the measuring window: the time in which requests came.

    `attainment` is the share of requests that kept both promises, `attainment_ttft` and `attainment_tpot`
    each of them; goodput counts requests and generated tokens of those that kept both, over the time in which
    they came. `requests_per_s` and `tokens_per_s` are what was finished and generated in that time.
    `token_gap_s` is the spread of gaps between tokens, to 5 %. `waiting_mean` is how many requests wait for
    an instance or a pipeline, in the mean over the whole run: they are with the coordinator, or on a prefill
    instance that nobody relieves of them, and in no unit's queue. `reused_share` is the share of prompt
    tokens that were found in a cache. `groups` are what its classes of requests keep, and deciles by length
    where those are promised (`plan.request_groups`).
    """

    name: str
    requests: int
    finished: int
    dropped: int
    unfinished: int
    retries: int
    requests_per_s: float
    tokens_per_s: float
    goodput_requests_per_s: float
    goodput_tokens_per_s: float
    attainment: float | None
    attainment_ttft: float | None
    attainment_tpot: float | None
    ttft_s: Spread
    tpot_s: Spread
    e2e_s: Spread
    largest_gap_s: Spread
    token_gap_s: Spread
    waiting_mean: float = 0.0
    reused_share: float = 0.0
    groups: tuple[KeptGroup, ...] = ()


@dataclass(frozen=True, slots=True)
class NodeSummary:
    """One unit (a group of `tp` GPUs of a node) over the whole run.

    `utilisation` is the share of the run in which it works, and `busy` that of the time in which requests
    come: after the last one came it has less and less to do.
    """

    instance: str
    node: str
    group: int
    node_type: str
    service: str
    phase: str
    layers: tuple[int, int]
    utilisation: float
    busy: float
    steps: int
    mean_sequences: float
    prompt_tokens: int
    decode_tokens: int
    kv_tokens: float
    kv_mean: float
    kv_peak: float
    queue_mean: float


@dataclass(frozen=True, slots=True)
class InstanceSummary:
    """One instance: when it was there and what it cost and made."""

    instance: str
    service: str
    phase: str
    region: str
    rented_s: float
    ready_s: float | None
    gone_s: float | None
    tokens: int
    usd: float


@dataclass(frozen=True)
class RequestColumns:
    """Per request, in order of arrival: seconds, counts and outcome (`OUTCOMES`); not known is NaN.

    `klass` is by number of the workload's classes.
    """

    service: NDArray[np.int16]
    klass: NDArray[np.int16]
    arrival_s: a.Floats
    input: NDArray[np.int32]
    output: NDArray[np.int32]
    ttft_s: a.Floats
    tpot_s: a.Floats
    largest_gap_s: a.Floats
    e2e_s: a.Floats
    retries: NDArray[np.int16]
    outcome: NDArray[np.int8]
    met_ttft: NDArray[np.bool_]
    met_tpot: NDArray[np.bool_]
    judged: NDArray[np.bool_]


@dataclass(frozen=True)
class TimeSeries:
    """By bin of time: requests and tokens per service, and how busy, full and crowded each unit was.

    `busy`, `kv` are shares of 0 to 1 and `queue` requests, means over a bin, (bins, units); `arrived`,
    `finished`, `tokens` are (bins, services); at the end of a bin `waiting` requests are without a route and
    `flying` on instances.
    """

    bin_s: float
    busy: a.Singles
    queue: a.Singles
    kv: a.Singles
    arrived: a.Longs
    finished: a.Longs
    tokens: a.Longs
    waiting: a.Longs
    flying: a.Longs


class RequestTable(ABC):
    """A run with its single requests as a table."""

    @abstractmethod
    def columns(self) -> dict[str, NDArray[Any]]:
        """Return the requests of the run, a column an array; times in seconds, NaN where there is none."""

    def to_frame(self) -> DataFrame:
        """Return the requests of the run as a pandas DataFrame; columns as in `columns`."""
        try:
            import pandas as pd
        except ImportError as error:
            raise MissingDependencyError("pandas", "notebook", needed_for="data frames") from error
        return pd.DataFrame(self.columns())


@dataclass(frozen=True)
class SimReport(RequestTable):
    """Everything a run found. The same inputs give the same result, `cpu_s` apart.

    `measured` says which step times rest on a server that was measured.
    """

    plan_name: str
    services: tuple[ServiceSummary, ...]
    nodes: tuple[NodeSummary, ...]
    instances: tuple[InstanceSummary, ...]
    requests: RequestColumns
    series: TimeSeries
    link_busy: Mapping[str, float]
    component_busy: Mapping[str, float]
    clock_s: float
    window_s: float
    finished: int
    dropped: int
    rejected: int
    retries: int
    usd: float
    usd_per_million_tokens: float | None
    cpu_s: float
    losses: tuple[KeptThroughLoss, ...]
    measured: tuple[str, ...]

    @cached_property
    def attainment(self) -> float | None:
        """The share of all judged requests in the window that kept both promises."""
        judged = self.requests.judged
        if not judged.any():
            return None
        return float((self.requests.met_ttft & self.requests.met_tpot)[judged].mean())

    def columns(self) -> dict[str, NDArray[Any]]:
        """Return the requests of the run, a column an array; times in seconds."""
        requests = self.requests
        names = np.array([service.name for service in self.services])
        return {
            "service": names[requests.service],
            "arrival_s": requests.arrival_s,
            "input": requests.input,
            "output": requests.output,
            "ttft_s": requests.ttft_s,
            "tpot_s": requests.tpot_s,
            "largest_gap_s": requests.largest_gap_s,
            "e2e_s": requests.e2e_s,
            "retries": requests.retries,
            "outcome": np.array(OUTCOMES)[requests.outcome],
            "slo_met": requests.met_ttft & requests.met_tpot,
        }

    @property
    def usd_per_hour(self) -> float:
        """Cost of the run per hour of its clock."""
        return self.usd / self.clock_s * 3600.0 if self.clock_s > 0.0 else 0.0

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens per second in the window, all services."""
        return sum(service.tokens_per_s for service in self.services)

    @classmethod
    def of(cls, built: Built, problem: Problem, options: SimOptions, cpu_s: float) -> SimReport:
        """Read the result off a finished run."""
        sim = built.sim
        run = sim.run[0]
        asked = sim.request[: int(run["requests"])]
        clock = float(run["clock_s"])
        going = np.isin(asked["state"], (a.WAITING, a.PREFILL, a.MOVING, a.DECODE, a.COMPONENT))
        cut = math.isfinite(options.until_s) and bool(going.any())
        if cut:
            clock = float(options.until_s)
        columns = _columns(asked, problem, built, options, clock)
        last = float(columns.arrival_s.max(initial=0.0))
        # After the last request came is the run-out. A run that is cut has none, and where all requests come
        # at once the run is all there is.
        until = clock if cut or last <= options.from_s else last
        window = max(until - options.from_s, 1e-9)
        services = tuple(
            _service(at, service, built, columns, options, until, clock)
            for at, service in enumerate(problem.services)
        )
        instances = tuple(_instances(built, clock))
        usd = sum(instance.usd for instance in instances) + _idle_usd(built, options, clock)
        tokens = int(sim.service_bin[a.TOKENS].sum())
        return cls(
            plan_name=built.history.plans[0].problem_name,
            services=services,
            nodes=tuple(_nodes(built, clock, options.from_s, until)),
            instances=instances,
            requests=columns,
            series=_series(sim, clock),
            link_busy=_links(built, clock),
            component_busy=_busy_components(sim, options, clock),
            clock_s=clock,
            window_s=window,
            finished=int(run["finished"]),
            dropped=int(run["lost"]),
            rejected=int(run["rejected"]),
            retries=int(run["retries"]),
            usd=usd,
            usd_per_million_tokens=usd / tokens * 1e6 if tokens else None,
            cpu_s=cpu_s,
            losses=tuple(
                kept_through_losses(
                    built.history,
                    [
                        (
                            one.name,
                            columns.arrival_s[own],
                            (columns.met_ttft & columns.met_tpot)[own],
                        )
                        for at, one in enumerate(services)
                        for own in [columns.judged & (columns.service == at)]
                    ],
                )
            ),
            measured=built.measured,
        )


def _tokens_per_s(sim: a.Sim, at: int, from_s: float, until_s: float, clock_s: float) -> float:
    """Return the rate at which tokens are made from one time to another, to a bin of time."""
    total, bin_s = int(sim.service[at]["tokens"]), float(sim.run[0]["bin_s"])
    if until_s < clock_s:
        by_bin = sim.service_bin[a.TOKENS, :, at]
        # What is made after the last bin is counted in it.
        whole = min(len(by_bin) - 1, int(until_s / bin_s + 1e-9))
        if whole * bin_s > from_s:
            return float(total - by_bin[whole:].sum()) / (whole * bin_s - from_s)
    return total / max(clock_s - from_s, 1e-9)


def _columns(
    q: a.Records, problem: Problem, built: Built, options: SimOptions, clock_s: float
) -> RequestColumns:
    came = q["arrival_s"] <= clock_s
    q = q[came]
    service = q["service"]
    ttft_s, tpot_s = promised_s(problem, built.classes, service, q["klass"])
    drawn = options.constants
    slower = [1.0 if drawn is None else drawn.first_token(server) for server in built.servers]
    later = (q["first_s"] - q["arrival_s"]) * (np.array(slower)[service] - 1.0)
    ttft = q["first_s"] - q["arrival_s"] + later
    llm_done = np.where(np.isin(q["state"], (a.DONE, a.COMPONENT)), q["last_s"], np.nan)
    gaps = q["answer"] - (1 if options.first_token else 0)
    with np.errstate(divide="ignore", invalid="ignore"):
        tpot = np.where(gaps > 0, (llm_done - q["first_s"]) / gaps, 0.0)
    tpot[np.isnan(llm_done)] = np.nan
    outcome = np.full(len(q), OUTCOMES.index("unfinished"), np.int8)
    outcome[q["state"] == a.DONE] = OUTCOMES.index("finished")
    outcome[q["state"] == a.DROPPED] = OUTCOMES.index("dropped")
    # What has not ended by then is late, whatever comes.
    by_s = np.where(np.isnan(q["first_s"]), q["arrival_s"] + ttft_s, q["first_s"] + gaps * tpot_s)
    decided = (outcome != OUTCOMES.index("unfinished")) | (clock_s > by_s)
    return RequestColumns(
        service=service.astype(np.int16),
        klass=q["klass"].astype(np.int16),
        arrival_s=q["arrival_s"].copy(),
        input=q["prompt"].astype(np.int32),
        output=q["answer"].astype(np.int32),
        ttft_s=ttft,
        tpot_s=tpot,
        largest_gap_s=np.where(np.isnan(llm_done), np.nan, q["gap_s"]),
        e2e_s=np.where(outcome == 0, q["end_s"] - q["arrival_s"] + later, np.nan),
        retries=q["retries"].astype(np.int16),
        outcome=outcome,
        met_ttft=(outcome != OUTCOMES.index("dropped")) & (ttft <= ttft_s),
        met_tpot=(outcome == 0) & (tpot <= tpot_s),
        judged=decided & (q["arrival_s"] >= options.from_s),
    )


def promised_s(
    problem: Problem,
    classes: Sequence[str],
    service: NDArray[np.integer],
    klass: NDArray[np.integer],
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the seconds to the first token and per further one that each request is promised.

    By the numbers of its service and of its class; classes that a service does not know have its promise.
    """
    found = np.empty((len(problem.services), len(classes), 2))
    for at, each in enumerate(problem.services):
        found[at] = each.ttft_s, each.tpot_s
        own = {one.name: one for one in each.text_classes}
        for number, name in enumerate(classes):
            if name in own:
                one = own[name]
                found[at, number] = one.ttft_s or each.ttft_s, one.tpot_s or each.tpot_s
    promised = found[service, klass]
    return promised[:, 0], promised[:, 1]


def _service(
    at: int,
    service: Service,
    built: Built,
    columns: RequestColumns,
    options: SimOptions,
    until_s: float,
    clock_s: float,
) -> ServiceSummary:
    sim, window_s = built.sim, max(until_s - options.from_s, 1e-9)
    ended_s = columns.arrival_s + columns.e2e_s
    # What is done at the end of a run is on its way back to the client then.
    last_s = until_s if until_s < clock_s else math.inf
    in_time = (columns.service == at) & (ended_s >= options.from_s) & (ended_s <= last_s)
    counted = (columns.service == at) & (columns.arrival_s >= options.from_s)
    judged = counted & columns.judged
    met = columns.met_ttft & columns.met_tpot & judged
    outcomes = np.bincount(columns.outcome[counted], minlength=len(OUTCOMES))

    def share(kept: NDArray[np.bool_]) -> float | None:
        return float(kept[judged].mean()) if judged.any() else None

    return ServiceSummary(
        name=service.name,
        requests=int(counted.sum()),
        finished=int(outcomes[0]),
        dropped=int(outcomes[1]),
        unfinished=int(outcomes[2]),
        retries=int(columns.retries[counted].sum()),
        requests_per_s=int(in_time.sum()) / window_s,
        tokens_per_s=_tokens_per_s(sim, at, options.from_s, until_s, clock_s),
        goodput_requests_per_s=int(met.sum()) / window_s,
        goodput_tokens_per_s=int(columns.output[met].sum()) / window_s,
        attainment=share(met),
        attainment_ttft=share(columns.met_ttft),
        attainment_tpot=share(columns.met_tpot),
        ttft_s=Spread.of(columns.ttft_s[counted]),
        tpot_s=Spread.of(columns.tpot_s[counted]),
        e2e_s=Spread.of(columns.e2e_s[counted]),
        largest_gap_s=Spread.of(columns.largest_gap_s[counted]),
        token_gap_s=_gap_spread(sim, at),
        reused_share=int(sim.service[at]["reused"]) / max(1, int(sim.service[at]["asked"])),
        waiting_mean=_mean(sim.service[at]["waiting"], sim.service[at]["waiting_moment"], clock_s),
        groups=_groups(service, built.classes, columns, judged),
    )


def _groups(
    service: Service, classes: tuple[str, ...], columns: RequestColumns, judged: NDArray[np.bool_]
) -> tuple[KeptGroup, ...]:
    """What classes and deciles of a service's judged requests keep."""
    rows = np.flatnonzero(judged)
    ttft, tpot, all_of_them = columns.met_ttft[rows], columns.met_tpot[rows], judged[rows]
    return judge_groups(
        group_requests(service, classes, columns.klass[rows], columns.input[rows]),
        all_of_them,
        ttft & tpot,
        {"ttft": (all_of_them, ttft), "tpot": (all_of_them, tpot)},
    )


def _gap_spread(sim: a.Sim, at: int) -> Spread:
    """The spread of gaps between tokens, from log bins, in which they lie evenly as far as this knows."""
    counts = sim.gap_count[at]
    total = int(counts.sum())
    if not total:
        return Spread(None, None, None, None, None)
    reached = np.cumsum(counts)
    marks = [int(np.searchsorted(reached, total * p / 100.0)) for p in PERCENTILES]
    ends = [
        mark - (reached[mark] - total * p / 100.0) / counts[mark]
        for mark, p in zip(marks, PERCENTILES, strict=True)
    ]
    read = [GAP_MIN_S * 10.0 ** (float(end) / GAP_PER_DECADE) for end in ends]
    return Spread(float(sim.service[at]["gap_sum"]) / total, *read)


def _nodes(built: Built, clock_s: float, from_s: float, until_s: float) -> list[NodeSummary]:
    sim = built.sim
    bin_s = float(sim.run[0]["bin_s"])
    bins = min(int(sim.run[0]["bins"]), int(clock_s / bin_s + 1e-9))
    ends = np.append(np.arange(bins + 1) * bin_s, clock_s)
    summaries: list[NodeSummary] = []
    groups: dict[tuple[int, int], int] = {}
    for at, unit in enumerate(built.lower.units):
        instance = built.history.standing[unit.instance].instance
        node = instance.nodes[unit.index]
        row = sim.unit[at]
        group = groups.get((unit.instance, unit.index), 0)
        groups[unit.instance, unit.index] = group + 1
        ahead = float(row["step_end"]) - clock_s if row["busy"] else 0.0
        worked = (float(row["busy_s"]) - ahead) / clock_s if clock_s > 0 else 0.0
        busy = worked
        if until_s < clock_s or from_s > 0.0:
            known = sim.unit_bin[a.BUSY_S, :bins, at].astype(np.float64)
            total = np.concatenate([[0.0], known, [float(row["busy_s"]) - ahead]])
            begun, ended = np.interp((from_s, until_s), ends, total)
            busy = min(1.0, (ended - begun) / max(until_s - from_s, 1e-9))
        summaries.append(
            NodeSummary(
                instance=instance.id,
                node=node.host or node.id,
                group=group,
                node_type=node.kind,
                service=instance.service,
                phase=str(instance.phase),
                layers=(node.start, node.end),
                utilisation=worked,
                busy=float(busy),
                steps=int(row["step_count"]),
                mean_sequences=float(row["batch_sum"]) / max(1, int(row["step_count"])),
                prompt_tokens=int(row["prompt_tokens"]),
                decode_tokens=int(row["decode_tokens"]),
                kv_tokens=float(row["room"]),
                kv_mean=_mean(row["used"], row["used_moment"], clock_s) / float(row["room"]),
                kv_peak=float(row["peak"] / row["room"]),
                queue_mean=_mean(sim.vertex[row["vertex"]]["queue"], row["queue_moment"], clock_s),
            )
        )
    return summaries


def _mean(last: float, moment: float, clock_s: float) -> float:
    """The mean over a run of what is `last` at its end and changed with this moment (`sim_arrays.UNIT`)."""
    return max(0.0, float(last) - float(moment) / clock_s) if clock_s > 0.0 else 0.0


def _instances(built: Built, clock_s: float) -> list[InstanceSummary]:
    summaries: list[InstanceSummary] = []
    for standing in built.history.standing:
        row = built.sim.instance[standing.number]
        gone = float(row["gone_s"])
        until = clock_s if math.isnan(gone) else min(gone, clock_s)
        ready = float(row["ready_s"])
        # The nodes of one that waits for another are paid for by that one.
        since = ready if standing.waits_for is not None else standing.rented_s
        paid = 0.0 if math.isnan(since) else max(0.0, until - since)
        summaries.append(
            InstanceSummary(
                instance=standing.instance.id,
                service=standing.instance.service,
                phase=str(standing.instance.phase),
                region=standing.instance.region,
                rented_s=standing.rented_s,
                ready_s=None if math.isnan(ready) else ready,
                gone_s=None if math.isnan(gone) else gone,
                tokens=int(row["tokens"]),
                usd=standing.instance.usd_per_hour * paid / 3600.0,
            )
        )
    return summaries


def _idle_usd(built: Built, options: SimOptions, clock_s: float) -> float:
    """Cost of GPUs of cut machines that no instance has, from plan to plan."""
    marks = sorted(min(epoch.time_s, clock_s) for epoch in options.epochs)
    times = pairwise([0.0, *marks, clock_s])
    return sum(
        plan.idle_usd * (end - begin) / 3600.0
        for plan, (begin, end) in zip(built.history.plans, times, strict=True)
    )


def _series(sim: a.Sim, clock_s: float) -> TimeSeries:
    bin_s = float(sim.run[0]["bin_s"])
    bins = min(int(sim.run[0]["bins"]), max(1, math.ceil(clock_s / bin_s - 1e-9)))
    total = sim.unit_bin[a.BUSY_S, :bins].astype(np.float64)
    busy = np.clip(np.diff(total, axis=0, prepend=0.0) / bin_s, 0.0, 1.0)
    return TimeSeries(
        bin_s=bin_s,
        busy=busy.astype(np.float32),
        queue=sim.unit_bin[a.QUEUED, :bins].copy(),
        kv=sim.unit_bin[a.FILLED, :bins].copy(),
        arrived=sim.service_bin[a.ARRIVED, :bins].copy(),
        finished=sim.service_bin[a.ENDED, :bins].copy(),
        tokens=sim.service_bin[a.TOKENS, :bins].copy(),
        waiting=sim.service_bin[a.WAITED, :bins].sum(axis=1),
        flying=sim.service_bin[a.FLYING, :bins, 0].copy(),
    )


def _links(built: Built, clock_s: float, limit: int = 20) -> dict[str, float]:
    """The busiest links and the share of time they send."""
    busy = built.sim.link["busy_s"] / max(clock_s, 1e-9)
    names = link_names(built.sites, [one.instance for one in built.history.standing])
    busy_by_link: dict[str, float] = {}
    for at in np.argsort(-busy, kind="stable")[:limit]:
        if busy[at] <= 0.0:
            break
        busy_by_link[names[int(at)]] = float(busy[at])
    return busy_by_link


def _busy_components(sim: a.Sim, options: SimOptions, clock_s: float) -> dict[str, float]:
    busy_shares: dict[str, float] = {}
    for at, component in enumerate(options.components):
        busy_s = sim.server["busy_s"][sim.server["pool"] == at]
        busy_shares[component.name] = float(busy_s.sum()) / (component.servers * max(clock_s, 1e-9))
    return busy_shares


def write_requests(result: RequestTable, path: Path) -> None:
    """Write the requests of a run, in the format its ending names."""
    kind = path.suffix.lower()
    if kind not in FILE_ENDINGS:
        raise UsageError(
            f"cannot write {path.name}", hint=f"name a {' or '.join(FILE_ENDINGS)} file"
        )
    atomic_write(path, _parquet(result) if kind == ".parquet" else _csv(result))


def _csv(result: RequestTable) -> str:
    table = result.columns()
    out = io.StringIO()
    out.write(",".join(table) + "\n")
    written = [_format_cell(column) for column in table.values()]
    out.writelines(",".join(row) + "\n" for row in zip(*written, strict=True))
    return out.getvalue()


def _format_cell(column: np.ndarray) -> list[str]:
    if column.dtype.kind == "f":
        return ["" if value != value else f"{value:.6f}" for value in column.tolist()]
    if column.dtype.kind == "b":
        return [str(int(value)) for value in column.tolist()]
    return [str(value) for value in column.tolist()]


def _parquet(result: RequestTable) -> bytes:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise MissingDependencyError("pyarrow", "parquet", needed_for="Parquet files") from error
    out = io.BytesIO()
    pq.write_table(pa.table(result.columns()), out)
    return out.getvalue()

"""The fleet's gateways, as a controller sees them: what they say, put together, and what they are told.

A gateway has a URL, and a Unix socket or a file with its admin token. All are asked at once, each with a
deadline. One that does not answer is left out, which is said once; where none does, what they said last holds
for a while, because a controller that hears nothing must not take that for nothing being asked.

A gateway that has not been told what the others were (it has started again, or was away) is told at the next
look.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from atoll.control.decision.control_view import (
    EndNotice,
    PaceSeen,
    PromiseSeen,
    TrafficSeen,
    TrafficWindow,
    name_class,
)
from atoll.control.operation.control_loop import TrafficReport
from atoll.control.operation.rhythm import RateHistory
from atoll.core.errors import AtollError, InputError
from atoll.core.files import read_text_limited
from atoll.plan.choice import ModelMix
from atoll.plan.plan import Route
from atoll.plan.problem import Lengths, Problem, Service
from atoll.plan.request_groups import length_ranges
from atoll.runtime.pool.routes import ChoiceRoutes, ModelPromise, ModelRoutes, RoutesTold
from atoll.telemetry.traffic_page import ModelTraffic, TrafficPage, WindowSums
from atoll.workload.classes import Brought, match_class, parse_class_name

TRAFFIC = "/atoll/v1/traffic"
ROUTES = "/atoll/v1/routes"
_TIMEOUT_S = 5.0
_MAX_ANSWER_BYTES = 16 * 2**20
_MAX_TOKEN_BYTES = 4096
HOLD_REPORT_S = 3600.0
"""For how long what gateways said last holds where none answers."""
MIN_WATCHED_S = 900.0
"""A gateway that counts for less has not seen enough to say that little is asked."""
MIN_MEASURED_LENGTHS = 30
"""Fewer requests say little about lengths: those of the fleet file hold."""
MAX_FORMER_INSTANCES = 256
"""Instances without a share any more that are told so."""
SHARE_DIGITS = 6


@dataclass(frozen=True, slots=True)
class GatewayAddress:
    """Where a gateway is asked: on its admin socket, or at its URL with the admin token in `token_file`."""

    url: str
    socket: Path | None = None
    token_file: Path | None = None

    @property
    def name(self) -> str:
        """Name for people."""
        return self.url if self.socket is None else str(self.socket)


class GatewayReply(NamedTuple):
    """Answer of a gateway."""

    status: int
    body: bytes


AskGateway = Callable[[GatewayAddress, str, str, object], Awaitable[GatewayReply]]
"""Asks a gateway: its address, method, path and a body for JSON. An `AtollError` where it does not answer."""


async def ask_gateway(
    address: GatewayAddress, method: str, path: str, body: object
) -> GatewayReply:
    """Ask a gateway over HTTP."""
    from atoll.runtime.http.http_client import request

    token = None
    if address.token_file is not None:
        token = read_text_limited(address.token_file, _MAX_TOKEN_BYTES).strip()
    answer = await request(
        f"{address.url.rstrip('/')}{path}",
        method=method,
        body=body,
        timeout_s=_TIMEOUT_S,
        api_key=token,
        max_bytes=_MAX_ANSWER_BYTES,
        unix_socket=address.socket,
    )
    return GatewayReply(answer.status, answer.body)


# Putting together what several say


@dataclass(frozen=True, slots=True)
class PooledWindow:
    """One window of one model over several gateways: rates add up, sums are pooled.

    `watched_s` is the longest time that one of them counted for, `kinds` are rates of requests by what they
    bring and want.
    """

    rate_per_s: float = 0.0
    watched_s: float = 0.0
    measured: int = 0
    input_sum: float = 0.0
    input_square_sum: float = 0.0
    output_sum: float = 0.0
    output_square_sum: float = 0.0
    judged: int = 0
    kept: int = 0
    kinds: tuple[tuple[str, float], ...] = ()

    @classmethod
    def of(cls, sums: WindowSums) -> PooledWindow:
        """Return what one gateway says."""
        return cls(
            sums.arrivals / sums.seconds,
            sums.seconds,
            sums.measured,
            sums.input_sum,
            sums.input_square_sum,
            sums.output_sum,
            sums.output_square_sum,
            sums.judged,
            sums.kept,
            tuple((kind, count / sums.seconds) for kind, count in sorted(sums.kinds.items())),
        )

    def lengths(self) -> Lengths | None:
        """Return the moments of lengths, as `workload.stats` has them; None for too few requests."""
        count = self.measured
        if count < MIN_MEASURED_LENGTHS:
            return None
        read, written = max(1.0, self.input_sum / count), max(1.0, self.output_sum / count)
        try:
            return Lengths(
                input_mean=read,
                output_mean=written,
                # A mean square is never below the square of the mean; rounding must not make it so.
                input_mean_square=max(read * read, self.input_square_sum / count),
                output_mean_square=max(written * written, self.output_square_sum / count),
            )
        except ValueError:  # no lengths that could be
            return None

    def window(self) -> TrafficWindow:
        """Return it as `decide` sees it."""
        return TrafficWindow(self.rate_per_s, self.lengths())


def pool_windows(one: PooledWindow, other: PooledWindow) -> PooledWindow:
    """Put two together; in any order and grouping it comes to the same, up to rounding."""
    return PooledWindow(
        one.rate_per_s + other.rate_per_s,
        max(one.watched_s, other.watched_s),
        one.measured + other.measured,
        one.input_sum + other.input_sum,
        one.input_square_sum + other.input_square_sum,
        one.output_sum + other.output_sum,
        one.output_square_sum + other.output_square_sum,
        one.judged + other.judged,
        one.kept + other.kept,
        tuple(sorted(_add_rates(one.kinds, other.kinds).items())),
    )


def _add_rates(*given: Iterable[tuple[str, float]]) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, rate in chain(*given):
        found[name] = found.get(name, 0.0) + rate
    return found


@dataclass(frozen=True, slots=True)
class PooledTraffic:
    """The windows of a service over its names and over several gateways."""

    minute: PooledWindow
    five_minutes: PooledWindow
    hour: PooledWindow


def pool_traffic(said: Iterable[ModelTraffic]) -> PooledTraffic:
    """Put together what gateways say of a service, under one name or several."""
    told = list(said)

    def pool(windows: Iterable[WindowSums]) -> PooledWindow:
        return reduce(pool_windows, map(PooledWindow.of, windows), PooledWindow())

    return PooledTraffic(
        pool(one.minute for one in told),
        pool(one.five_minutes for one in told),
        pool(one.hour for one in told),
    )


def see_classes(
    service: Service, pooled: PooledTraffic, rhythm: RateHistory
) -> tuple[TrafficSeen, ...]:
    """Return the traffic of each class of an any-to-any service; none of a plain one."""
    if not service.is_graph:
        return ()
    minute, five, hour = (
        split_rate(service, window.rate_per_s, window.kinds)
        for window in (pooled.minute, pooled.five_minutes, pooled.hour)
    )
    return tuple(
        TrafficSeen(
            klass.name,
            TrafficWindow(minute[klass.name]),
            TrafficWindow(five[klass.name]),
            TrafficWindow(hour[klass.name]),
            *rhythm.profile(name_class(service.name, klass.name)),
        )
        for klass in service.classes
    )


def split_rate(
    service: Service, rate_per_s: float, kinds: Iterable[tuple[str, float]]
) -> dict[str, float]:
    """Return the requests/s of each class, from those of all and of those that are not text for text.

    As graph servers do: a request is of the class that brings and wants as much, or the smallest that has all
    of it. Classes that nothing tells apart have their written shares of it, as all have of what fits none.
    """
    written: dict[Brought, dict[str, float]] = {}
    for klass in service.classes:
        written.setdefault(parse_class_name(klass.name), {})[klass.name] = klass.share
    every = {klass.name: klass.share for klass in service.classes}
    rates = dict.fromkeys(every, 0.0)
    media = _add_rates(kinds)
    text = max(0.0, rate_per_s - sum(media.values()))
    for name, rate in (("text", text), *sorted(media.items())):
        try:
            found = match_class(parse_class_name(name), written)
        except InputError:  # a gateway of another version may know others
            found = None
        among = every if found is None else written[found]
        total = sum(among.values())
        for one, share in among.items():
            rates[one] += rate * share / total
    return rates


def _see_groups(service: Service, said: Iterable[ModelTraffic]) -> list[PromiseSeen]:
    """Return what groups of requests keep that the length of a prompt tells apart."""
    targets = {group.name: group.target for group, _ in length_ranges(service)}
    sums: dict[str, list[int]] = {}
    for one in said:
        for name, group in one.groups.items():
            # What an earlier fleet file asked for is left out.
            if name in targets and group.judged:
                total = sums.setdefault(name, [0, 0])
                total[0] += group.judged
                total[1] += group.kept
    return [
        PromiseSeen(service.name, kept / judged, targets[name], judged, name)
        for name, (judged, kept) in sums.items()
    ]


def pool_ends(pages: Iterable[TrafficPage]) -> tuple[EndNotice, ...]:
    """Return the nearest end that any gateway knows of each instance."""
    ends: dict[str, float] = {}
    for page in pages:
        for end in page.ends:
            ends[end.instance] = min(end.ends_s, ends.get(end.instance, end.ends_s))
    return tuple(EndNotice(name, ends[name]) for name in sorted(ends))


def pool_paces(pages: Iterable[TrafficPage]) -> tuple[PaceSeen, ...]:
    """Return how fast tokens of each instance come, over all gateways that it answers."""
    sums: dict[str, tuple[float, int, float]] = {}
    for page in pages:
        for name, pace in page.paces.items():
            rate, tokens, seconds = sums.get(name, (0.0, 0, 0.0))
            rate += pace.requests / pace.seconds
            sums[name] = rate, tokens + pace.tokens, seconds + pace.sum_s
    return tuple(
        PaceSeen(name, seconds / tokens, tokens, rate)
        for name, (rate, tokens, seconds) in sorted(sums.items())
        if tokens
    )


def names_of(services: Sequence[Service]) -> dict[str, tuple[str, ...]]:
    """Return the names that services are asked for by where nobody says: their own, and their model's.

    A model that several services have says nothing of which one is meant.
    """
    models = [service.model for service in services]
    return {
        service.name: (service.name, service.model)
        if models.count(service.model) == 1 and service.model != service.name
        else (service.name,)
        for service in services
    }


# The gateways of a fleet


class GatewayGroup:
    """The gateways that serve a fleet, for `control_loop`; nothing raises out of it.

    `names` are those that requests ask for, by service. `say` is told in one line what is wrong, once.
    `problem` may be replaced when the fleet file changes. Not for use inside of an event loop.
    """

    def __init__(
        self,
        problem: Problem,
        gateways: Sequence[GatewayAddress],
        *,
        names: Mapping[str, Sequence[str]] | None = None,
        rhythm: RateHistory | None = None,
        say: Callable[[str], None] | None = None,
        ask: AskGateway = ask_gateway,
        mixes: Sequence[ModelMix] = (),
    ) -> None:
        self.problem = problem
        self.mixes = tuple(mixes)
        """Which models answer the choices of the fleet, whose problem is settled by them."""
        self._gateways = tuple(gateways)
        self._names = names
        self._rhythm = rhythm or RateHistory()
        self._say_to = say
        self._ask = ask
        self._faults: dict[str, str] = {}
        self._last: tuple[float, TrafficReport] | None = None
        self._routes: tuple[Route, ...] | None = None
        self._former: dict[str, None] = {}

    @property
    def addresses(self) -> tuple[GatewayAddress, ...]:
        """Where they are asked."""
        return self._gateways

    # What they say

    def look(self, now_s: float) -> TrafficReport:
        """Return what was asked and kept lately, by those that answer; what they said last if none does."""
        replies = self._ask_all(self._gateways, "GET", TRAFFIC, None)
        pages: dict[GatewayAddress, TrafficPage] = {}
        for address, reply in replies.items():
            page = self._read(address, reply)
            if page is not None:
                pages[address] = page
        if not pages:
            if self._last is None or now_s - self._last[0] > HOLD_REPORT_S:
                return TrafficReport()
            held = self._last[1]
            # Ends stay true, and so does what is asked, as far as anybody knows; shares kept do not.
            return TrafficReport(held.traffic, (), held.notices)
        report = self._report(now_s, list(pages.values()))
        self._last = now_s, report
        self._remind(pages)
        return report

    def _read(self, address: GatewayAddress, reply: GatewayReply | str) -> TrafficPage | None:
        if isinstance(reply, str):
            self._fault(address.name, f"gateway {address.name} is left out: {reply}")
            return None
        if reply.status != 200:
            text = f"it answered with status {reply.status}: {_shorten(reply.body)}"
            self._fault(address.name, f"gateway {address.name} is left out: {text}")
            return None
        try:
            page = TrafficPage.from_json(reply.body)
        except AtollError as error:
            text = f"its answer cannot be read: {error}"
            self._fault(address.name, f"gateway {address.name} is left out: {text}")
            return None
        self._well(address.name, f"gateway {address.name} answers again")
        return page

    def _report(self, now_s: float, pages: Sequence[TrafficPage]) -> TrafficReport:
        traffic, promises, rates = [], [], {}
        for service in self.problem.services:
            said = [
                page.models[name]
                for page in pages
                for name in self._names_of(service)
                if name in page.models
            ]
            pooled = pool_traffic(said)
            judged = pooled.five_minutes.judged
            # Told even where the rate is not believed yet: what was judged was judged.
            if judged:
                kept = pooled.five_minutes.kept / judged
                promises.append(PromiseSeen(service.name, kept, service.attainment, judged))
            promises += _see_groups(service, said)
            if not self._believes(service, pooled, now_s):
                continue
            rates[service.name] = pooled.five_minutes.rate_per_s
            classes = see_classes(service, pooled, self._rhythm)
            rates |= {
                name_class(service.name, one.service): one.five_minutes.rate_per_s
                for one in classes
            }
            profile, period_s = self._rhythm.profile(service.name)
            traffic.append(
                TrafficSeen(
                    service.name,
                    pooled.minute.window(),
                    pooled.five_minutes.window(),
                    pooled.hour.window(),
                    profile,
                    period_s,
                    classes,
                )
            )
        self._rhythm.note(now_s, rates)
        if self._rhythm.problem is not None:
            self._fault("rhythm", self._rhythm.problem)
        else:
            self._well("rhythm", "the rhythm of the traffic is kept again")
        serving = frozenset(name for page in pages for name in page.serving)
        return TrafficReport(
            tuple(traffic), tuple(promises), pool_ends(pages), serving, pool_paces(pages)
        )

    def _believes(self, service: Service, pooled: PooledTraffic, now_s: float) -> bool:
        """Whether what was counted says how much is asked.

        Gateways that have just started, before a service that nobody has seen yet, have seen nothing: that is
        no reason to leave out what the fleet file asks for.
        """
        if pooled.hour.watched_s >= MIN_WATCHED_S or self._rhythm.knows(service.name, now_s):
            return True
        return pooled.five_minutes.rate_per_s >= service.rate_per_s

    def _names_of(self, service: Service) -> Sequence[str]:
        names = self._names
        found = None if names is None else names.get(service.name)
        if found is None:
            found = names_of(self.problem.services)[service.name]
        return tuple(dict.fromkeys(found))

    # What they are told

    def route(self, routes: Sequence[Route]) -> None:
        """Tell who serves which share from now on; one that does not hear it is told at the next look."""
        before = {name for route in self._routes or () for name in route.instances}
        now = {name for route in routes for name in route.instances}
        self._former |= dict.fromkeys(sorted(before - now))
        for name in now:
            self._former.pop(name, None)
        # The oldest are forgotten first: a dict keeps the order in which they came.
        for name in list(self._former)[: max(0, len(self._former) - MAX_FORMER_INSTANCES)]:
            del self._former[name]
        self._routes = tuple(routes)
        self._tell(self._gateways)

    def _remind(self, pages: Mapping[GatewayAddress, TrafficPage]) -> None:
        """Tell those again that have been told something else, or nothing."""
        if self._routes is not None:
            # A hash tells what a gateway holds without sending it.
            told = self.told().content_hash()
            self._tell([address for address, page in pages.items() if page.routes != told])

    def _tell(self, addresses: Sequence[GatewayAddress]) -> None:
        if not addresses:
            return
        body = self.told().model_dump(mode="json")
        for address, reply in self._ask_all(addresses, "PUT", ROUTES, body).items():
            key = f"routes {address.name}"
            if isinstance(reply, str):
                self._fault(key, f"gateway {address.name} was not told its routes: {reply}")
            elif reply.status != 200:
                text = f"status {reply.status}: {_shorten(reply.body)}"
                self._fault(key, f"gateway {address.name} refused its routes: {text}")
            else:
                self._well(key, f"gateway {address.name} was told its routes")

    def told(self) -> RoutesTold:
        """Return what gateways are told now: shares by instance and promises, under every name.

        What had a share and has none any more gets 0, so that nothing is sent to what is drained next.
        """
        shares: dict[str, dict[str, float]] = {}
        pairs: dict[str, list[tuple[str, str, float]]] = {}
        for route in self._routes or ():
            mine = shares.setdefault(route.service, {})
            for name in route.instances:
                mine[name] = mine.get(name, 0.0) + route.share
            if len(route.instances) > 1:
                first, last = route.instances
                apart = pairs.setdefault(route.service, [])
                apart.append((first, last, round(route.share, SHARE_DIGITS)))
        models: dict[str, ModelRoutes] = {}
        for service in self.problem.services:
            given = shares.get(service.name, {})
            # Zeros stand only beside somebody's share: a service that nobody serves has no weights at all.
            weights = dict.fromkeys(self._former, 0.0) if given else {}
            # Rounded, so that the last digits of a share are nothing new to tell.
            weights |= {name: round(share, SHARE_DIGITS) for name, share in given.items()}
            routes = ModelRoutes(
                weights=dict(sorted(weights.items())),
                pairs=tuple(sorted(pairs.get(service.name, ()))),
                promise=ModelPromise.of(service),
            )
            models |= dict.fromkeys(self._names_of(service), routes)
        choices = {mix.name: ChoiceRoutes.of(mix) for mix in self.mixes}
        return RoutesTold(fleet=self.problem.name, models=models, choices=choices)

    # Asking

    def _ask_all(
        self, addresses: Sequence[GatewayAddress], method: str, path: str, body: object
    ) -> dict[GatewayAddress, GatewayReply | str]:
        """Ask all at once; of one that does not answer, why."""

        async def ask(address: GatewayAddress) -> GatewayReply | str:
            try:
                return await self._ask(address, method, path, body)
            except AtollError as error:
                return str(error)
            except Exception as error:  # noqa: BLE001 - a bug in asking must not stop a controller
                return repr(error)

        async def ask_each() -> list[GatewayReply | str]:
            return list(await asyncio.gather(*map(ask, addresses)))

        return dict(zip(addresses, asyncio.run(ask_each()), strict=True))

    def _fault(self, key: str, text: str) -> None:
        """Say what is wrong, if that is news."""
        is_news = key not in self._faults
        self._faults[key] = text
        if is_news:
            self._say(text)

    def _well(self, key: str, text: str) -> None:
        if self._faults.pop(key, None) is not None:
            self._say(text)

    def _say(self, text: str) -> None:
        if self._say_to is not None:
            self._say_to(text[:1000])


def _shorten(body: bytes) -> str:
    """Return the beginning of an answer, on one line."""
    return " ".join(body[:300].decode("utf-8", "replace").split())
